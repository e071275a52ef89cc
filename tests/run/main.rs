//! Complete runs of the `ft` program: equal results, recovery, refused inputs.

mod adapters;
mod aligned;
mod bench;
mod caps;
mod quantfiles;
mod quantized;
mod directory;
mod distill;
mod chat;
mod columns;
mod equal;
mod export;
mod hostile;
mod large;
mod learning;
mod optimizers;
mod plans;
mod preference;
mod quickstart;
mod rl;
mod resume;
mod sandbox;
mod screen;
mod shipped;
mod tiers;
mod tokens;
