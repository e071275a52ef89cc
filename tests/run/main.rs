//! Whole runs of the `ft` program: what stays equal, what survives, what is refused.

mod adapters;
mod bench;
mod caps;
mod equal;
mod hostile;
mod optimizers;
mod plans;
mod quickstart;
mod resume;
mod tiers;
