//! The connection between ranks, as a group uses it (MPI, TCP and NCCL, channels in tests).

use crate::base::Result;
use candle_core::Device;
use std::time::Duration;

/// Most time between two heartbeats; less if ranks wait for a short time only.
#[cfg(any(feature = "mpi", feature = "nccl"))]
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(10);

/// Time between two looks at the connections to the other ranks.
pub(super) const POLL: Duration = Duration::from_millis(50);

/// Moves lists between ranks. The list of the own rank, and empty lists, do not travel.
pub trait Wire {
    /// Sends each list of `out` to its rank and fills each list of `into` (of the length that its rank sends). The lists
    /// between two ranks are in the same order on both.
    fn bytes(&mut self, out: &[(usize, &[u8])], into: &mut [(usize, &mut [u8])], wait: &WaitLimit);

    /// As `bytes`.
    fn floats(&mut self, out: &[(usize, &[f32])], into: &mut [(usize, &mut [f32])], wait: &WaitLimit);

    /// True if two ranks cannot share a device.
    const OWN_DEVICES: bool = false;

    /// Numbers are in the memory of `device` from now on: connects the devices of all ranks, if the wire uses them. Also `Ok` if
    /// another rank has failed, which says so in its next operation.
    ///
    /// # Errors
    /// The devices cannot be connected (`Unsupported`), for example because a rank trains on the CPU.
    fn device(&mut self, _device: &Device, _wait: &WaitLimit) -> Result<()> {
        Ok(())
    }

    /// Called while this rank computes or works alone: sends the others a heartbeat (`WaitLimit::heartbeat_every`). A
    /// wire that sees that a rank is gone ends the job.
    fn idle(&mut self, _wait: &WaitLimit) {}

    /// Ends the whole job.
    fn abort(&mut self, code: i32);
}

/// How long a wire waits, and what it says before it ends the job.
pub struct WaitLimit {
    /// `None`: no limit while the missing ranks send heartbeats.
    pub limit: Option<Duration>,
    /// Longest time without a heartbeat from a rank that computes or works alone.
    pub silence: Duration,
    /// The last operation of the job, or one after a failure: a rank that closes its connection is not lost.
    pub last: bool,
    /// Name of this rank.
    pub(super) name: String,
    /// The failure of this rank, which the others do not know yet.
    pub(super) own: Option<String>,
    pub(super) say: PrintLine,
}

impl WaitLimit {
    /// Says which ranks are missing at the limit. The wire then ends the job.
    pub fn late(&self, missing: &[usize]) {
        let seconds = self.limit.unwrap_or_default().as_secs();
        // After a failure of this rank the limit is another one, and no setting.
        let setting = match self.own {
            None => " (see `Collective::set_timeout`)",
            Some(_) => "",
        };
        let missing = numbered(missing);
        self.say_end(&format!(" has waited {seconds} s for {missing}{setting}"));
    }

    /// Time between two heartbeats.
    #[cfg(any(feature = "mpi", feature = "nccl"))]
    pub fn heartbeat_every(&self) -> Duration {
        HEARTBEAT_INTERVAL.min(self.silence / 8)
    }

    /// Says which ranks send no heartbeat. The wire then ends the job.
    #[cfg(any(feature = "mpi", feature = "nccl"))]
    pub fn silent(&self, missing: &[usize]) {
        let seconds = self.silence.as_secs();
        let missing = numbered(missing);
        self.say_end(&format!(
            ": no heartbeat of {missing} for {seconds} s, its process hangs or its machine is lost"
        ));
    }

    /// Says why the job ends.
    pub fn ends(&self, why: &str) {
        self.say_end(&format!(": {why}"));
    }

    fn say_end(&self, what: &str) {
        if let Some(own) = &self.own {
            (self.say)(&format!("[{}] {own}", self.name));
        }
        let name = &self.name;
        (self.say)(&format!("{name}{what}: the job ends; the newest checkpoint is valid"));
    }

    /// The same, with a failure of this rank that the others do not know.
    #[cfg(feature = "nccl")]
    pub fn with_own(&self, own: Option<String>) -> Self {
        Self {
            limit: self.limit,
            silence: self.silence,
            last: self.last,
            name: self.name.clone(),
            own: own.or_else(|| self.own.clone()),
            say: self.say,
        }
    }
}

/// `rank 1`, `ranks 1, 2`.
fn numbered(ranks: &[usize]) -> String {
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!("{noun} {}", ranks.join(", "))
}

/// Prints a line for the user.
pub(crate) type PrintLine = fn(&str);
