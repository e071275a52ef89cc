//! Where the weights of a model are stored.

use std::fmt;

/// Where the weights are stored that are not trained now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// On the device.
    Device,
    /// Each rank of a job has a part of every matrix of the layers; a layer is collected before its use.
    Sharded,
    /// Each rank of a job has a part of every matrix of the layers in host memory; a layer is collected, then copied to a GPU. Head
    /// and active parameters are on the GPU, of active matrices the own part.
    ShardedHost,
    /// Each rank of a job has some of the routed experts, and everything else.
    ExpertParallel,
    /// In host memory, with computation on a GPU; head and active parameters are on the device.
    Host,
    /// Layers are read from the disk; the output projection in chunks of rows, or held whole.
    Disk {
        /// Rows of the output projection per chunk; `None`: it is held whole.
        head_rows: Option<usize>,
    },
}

impl Placement {
    /// Rows per chunk of the output projection, if it is never held whole. Active parameters are.
    pub fn head_chunk(self, active: bool) -> Option<usize> {
        match self {
            Placement::Disk { head_rows } if !active => head_rows,
            _ => None,
        }
    }

    /// True if rows of the embedding are read one by one. `tied`: it is the output projection too.
    pub fn reads_embedding_rows(self, active: bool, tied: bool) -> bool {
        self.streams_layers() && !active && (!tied || self.head_chunk(false).is_some())
    }

    /// True if each rank has a part of every matrix of the layers.
    pub fn is_sharded(self) -> bool {
        matches!(self, Placement::Sharded | Placement::ShardedHost)
    }

    /// True if routed experts are copied to the device one by one, as tokens need them.
    pub fn streams_experts(self) -> bool {
        self.streams_layers() && self != Placement::ShardedHost
    }

    /// True if the weights are copied to the device layer by layer.
    pub fn streams_layers(self) -> bool {
        match self {
            Placement::Device | Placement::Sharded | Placement::ExpertParallel => false,
            Placement::Host | Placement::ShardedHost | Placement::Disk { .. } => true,
        }
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device => f.write_str("on the device"),
            Self::Sharded => f.write_str("in parts on the ranks"),
            Self::ShardedHost => f.write_str("in parts on the ranks, in host memory"),
            Self::ExpertParallel => f.write_str("on the device, experts divided among the ranks"),
            Self::Host => f.write_str("in host memory"),
            Self::Disk { head_rows: None } => f.write_str("on the disk"),
            Self::Disk { head_rows: Some(rows) } => write!(f, "on the disk, head in chunks of {rows} rows"),
        }
    }
}
