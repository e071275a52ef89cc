//! Tests of the checks before a run: known answers for `numeric`, the length of what a reward model reads.

use super::testing::{prompt, reward_model, section};
use super::*;

fn numeric() -> RlSection {
    section(&["numeric".to_string()])
}

fn prompts(answers: &[Value]) -> Vec<Prompt> {
    (1..)
        .zip(answers)
        .map(|(line, answer)| prompt(line, answer.clone()))
        .collect()
}

#[test]
fn known_answers_without_any_number_are_refused_for_numeric() {
    let words = prompts(&[json!("winter"), json!(["spring", "summer"])]);
    let e = check(&numeric(), &words, &[]).unwrap_err().to_string();
    assert!(
        e.contains("no known answer has a number") && e.contains("t.jsonl:1") && e.contains("winter"),
        "{e}"
    );
    check(&section(&["exact".to_string()]), &words, &[]).unwrap();
    check(&numeric(), &prompts(&[json!("winter"), json!("13")]), &words).unwrap();
    // There may be no rows for evaluation.
    check(&numeric(), &[], &[]).unwrap();
    let e = check(
        &numeric(),
        &prompts(&[json!("13")]),
        &prompts(&[json!("13"), Value::Null]),
    )
    .unwrap_err()
    .to_string();
    assert!(e.contains("needs the right answer") && e.contains("t.jsonl:2"), "{e}");
}

#[test]
fn known_answers_that_are_not_one_number_give_a_warning_with_their_count() {
    let of = |train: &[Value], eval: &[Value]| warnings(&numeric(), &prompts(train), &prompts(eval)).unwrap();
    assert_eq!(
        of(&[json!("13"), json!("#### 1300 of 2\n#### 13")], &[json!(2)]),
        Vec::<String>::new()
    );
    let found = of(&[json!("13"), json!("winter")], &[json!("none"), json!("1.5")]);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].starts_with("2 of 4 known answers have no number") && found[0].contains("t.jsonl:2"),
        "{found:?}"
    );
    let found = of(&[json!("12:30"), json!("7"), json!("1.000.000")], &[]);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].starts_with("2 of 3 known answers have several numbers") && found[0].contains("t.jsonl:1"),
        "{found:?}"
    );
}

#[test]
fn a_reward_model_with_too_few_positions_gives_a_warning_before_the_run() {
    let dir = tempfile::tempdir().unwrap();
    reward_model(dir.path(), &|_, _| {});
    let mut rlhf = section(&[format!("model:{}", dir.path().display())]);
    let ask = prompts(&[Value::Null]);
    // 512 positions, 10 tokens of the prompt.
    rlhf.max_completion_length = 502;
    assert_eq!(warnings(&rlhf, &ask, &[]).unwrap(), Vec::<String>::new());
    rlhf.max_completion_length = 503;
    let none: &[Prompt] = &[];
    for (train, eval) in [(&ask[..], none), (none, &ask[..])] {
        let found = warnings(&rlhf, train, eval).unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].contains("513 tokens") && found[0].contains("at most 512"),
            "{found:?}"
        );
    }
}
