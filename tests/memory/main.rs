//! The forecast against what is measured: an allocator that counts, and the memory of the process.

mod counting;
mod hostile;
mod layer;
mod peak;
mod stages;
mod table;

/// One test at a time: another one beside it would be counted too.
static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
