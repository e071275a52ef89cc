//! What is too much for every run of the tests is taken in turn. `FT_TEST_TURN` is the number of the turn; `.ci/run` takes the
//! number of commits. It is printed with a failure.

pub fn turn() -> usize {
    let turn = std::env::var("FT_TEST_TURN").map_or(0, |n| n.parse().expect("FT_TEST_TURN is a number"));
    println!("FT_TEST_TURN={turn}");
    turn
}

pub fn in_turn<T: Copy>(all: &[T]) -> T {
    all[turn() % all.len()]
}
