//! Whole runs of the `ft` program: what stays equal, what survives, what is refused.

mod bench;
mod caps;
mod chat;
mod equal;
mod hostile;
mod optimizers;
mod plans;
mod quickstart;
mod resume;
mod tiers;
