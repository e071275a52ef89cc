//! Whole runs of the `ft` program: what stays equal, what survives, what is refused.

mod bench;
mod caps;
mod distill;
mod equal;
mod hostile;
mod optimizers;
mod plans;
mod quickstart;
mod resume;
mod tiers;
