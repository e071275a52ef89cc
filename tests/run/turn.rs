//! What is too much for every run of the tests is taken in turn. `FT_TEST_TURN` is the number of the turn; `.ci/run` takes the
//! number of commits, so that a test that fails fails again with the same sources.

pub fn turn() -> usize {
    std::env::var("FT_TEST_TURN").map_or(0, |n| n.parse().expect("FT_TEST_TURN is a number"))
}

pub fn in_turn<T: Copy>(all: &[T]) -> T {
    all[turn() % all.len()]
}
