//! The sets of parameters that a run trains one after the other.

use crate::engine::ActiveSet;
use crate::source::Placement;

/// Elements of parameters that were trained earlier in the run and are inactive now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct InactiveElements {
    pub dense: u64,
    /// Elements of quantized parameters.
    pub quantized: u64,
}

/// Bytes of a parameter for each of its elements.
#[derive(Debug, Clone, Copy, Default)]
pub struct ElementBytes {
    /// In the model's type.
    pub stored: u64,
    /// The low part of the fp32 master.
    pub master: u64,
}

impl InactiveElements {
    /// Bytes in the model's type and of the low part of fp32 masters. With weights on the disk both are read back on
    /// demand.
    pub fn bytes(self, place: Placement, element: ElementBytes) -> u64 {
        let ElementBytes { stored, master } = element;
        match place {
            // The exact values stay beside the quantized data.
            Placement::Device
            | Placement::Sharded
            | Placement::ShardedHost
            | Placement::ExpertParallel
            | Placement::Host => self.dense * master + self.quantized * (stored + master),
            Placement::Disk { .. } => 0,
        }
    }
}

/// A set of parameters that is active at one time.
#[derive(Debug, Clone, PartialEq)]
pub struct ActivePeriod {
    pub active: ActiveSet,
    pub inactive: InactiveElements,
    /// True if another set becomes active after it.
    pub deactivates: bool,
}

impl ActivePeriod {
    /// A run with only one set.
    pub fn alone(active: ActiveSet) -> Self {
        Self {
            active,
            inactive: InactiveElements::default(),
            deactivates: false,
        }
    }
}
