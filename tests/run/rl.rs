//! RL stages: results, resuming to the same bits, and errors of invalid inputs.

use crate::bench::{Bench, number, said};
use crate::resume::assert_same;
use std::fs;
use std::time::{Duration, Instant};

/// Rewards that a random model reaches occasionally.
const BASE: [&str; 14] = [
    "train.stage=grpo",
    "tune.method=lora",
    "tune.lora.r=4",
    "train.batch_size=2",
    "train.gradient_accumulation_steps=2",
    "train.save_steps=0",
    "rlhf.rewards=[\"regex:[aeiou]\", \"length:4\"]",
    "rlhf.reward_weights=[1.0, 0.5]",
    "rlhf.num_generations=4",
    "rlhf.max_completion_length=8",
    "rlhf.sample_steps=1",
    "rlhf.samples=2",
    "schedule.name=constant",
    "optimizer.learning_rate=3e-3",
];

/// RL variants with different state: rollout buffer, reference, value head, KL control.
const WAYS: [(&str, &[&str]); 6] = [
    (
        "grpo, several steps a rollout",
        &["rlhf.num_iterations=2", "rlhf.num_mini_batches=2", "rlhf.grpo.beta=0.1"],
    ),
    (
        "grpo of all weights",
        &["tune.method=full", "rlhf.grpo.beta=0.05", "rlhf.temperature=0.8"],
    ),
    (
        "rloo by blocks",
        &[
            "tune.method=block",
            "tune.block.switch_every=2",
            "rlhf.grpo.loss_type=rloo",
            "rlhf.num_iterations=3",
        ],
    ),
    (
        "ppo, KL led to a target",
        &[
            "train.stage=ppo",
            "rlhf.num_generations=1",
            "rlhf.num_iterations=2",
            "rlhf.num_mini_batches=2",
            "rlhf.ppo.kl_target=0.5",
            "rlhf.ppo.kl_horizon=20",
        ],
    ),
    (
        "coded rollouts",
        &[
            "tune.method=full",
            "rlhf.rollout_weights=int8",
            "rlhf.rollout_correction=token_truncate",
        ],
    ),
    (
        "ppo of all weights",
        &["train.stage=ppo", "tune.method=full", "rlhf.num_generations=2"],
    ),
];

/// If a key is in both lists, the variant's value is used.
fn settings<'a>(way: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    let key = |s: &str| s.split('=').next().unwrap().to_string();
    let said: Vec<&str> = way.iter().chain(more).copied().collect();
    let base = BASE.into_iter().filter(|b| !said.iter().any(|w| key(w) == key(b)));
    let lora = !said.iter().any(|w| w.starts_with("tune.method"));
    let base = base.filter(|b| lora || !b.starts_with("tune.lora"));
    base.chain(said.iter().copied()).collect()
}

/// Row R4.
#[test]
fn every_way_resumes_to_the_same_bits() {
    for (name, way) in WAYS {
        let bench = Bench::new();
        bench.train(&settings(way, &["train.max_steps=7", "train.output_dir=whole"]));
        // Five steps end in the middle of a rollout, if a rollout has several steps.
        let save = "train.save_steps=5";
        bench.train(&settings(way, &["train.max_steps=5", "train.output_dir=broken", save]));
        fs::remove_dir_all(bench.path("broken/final")).unwrap();
        bench.train(&settings(
            way,
            &["train.max_steps=7", "train.output_dir=broken", save, "--resume"],
        ));
        assert_same(&bench, "whole", "broken");
        let (whole, broken) = (bench.steps("whole"), bench.steps("broken"));
        let mut rollouts = 0;
        for (a, b) in whole.iter().zip(&broken) {
            for key in [
                "reward",
                "reward_std",
                "reward_regex",
                "reward_length",
                "completion_length",
                "kl",
                "kl_coef",
            ] {
                assert_eq!(a[key], b[key], "{name}: {key} at step {}", a["step"]);
            }
            rollouts += usize::from(a["reward"].is_number());
            assert!(
                number(a, "loss").is_finite() && number(a, "entropy") > 0.0,
                "{name}: {a}"
            );
        }
        let steps = [(0, 4), (1, 1), (2, 3), (3, 4), (4, 1), (5, 1)];
        let each = steps.iter().find(|(i, _)| WAYS[*i].0 == name).unwrap().1;
        assert_eq!(rollouts, 7usize.div_ceil(each), "{name}");
        if name == "coded rollouts" {
            for step in &whole {
                let (ratio, apart) = (
                    number(step, "rollout_ratio"),
                    number(step, "rollout_log_prob_difference"),
                );
                assert!((ratio - 1.0).abs() < 0.2 && apart > 0.0 && apart < 0.2, "{step}");
            }
        }
        let samples = bench.lines("whole/samples.jsonl");
        assert_eq!(samples.len(), 2 * rollouts, "{name}");
        for sample in &samples {
            assert!(
                sample["completion"].is_string() && sample["rewards"]["length"].is_number(),
                "{sample}"
            );
            assert!(sample["prompt"].as_str().unwrap().contains("assistant"), "{sample}");
        }
    }
}

fn fails(bench: &Bench, more: &[&str], code: i32, words: &[&str]) -> String {
    let mut arguments = vec!["train", "--recipe", "r.toml", "train.output_dir=out", "--overwrite"];
    let all = settings(&[], more);
    arguments.extend(all);
    let out = bench.ft(&arguments);
    let said = said(&out);
    assert_eq!(out.status.code(), Some(code), "{said}");
    for word in words {
        assert!(said.contains(word), "`{word}` is not in:\n{said}");
    }
    assert!(!bench.path("out/final").exists());
    said
}

#[test]
fn prompts_and_rewards_that_are_wrong_are_refused_before_anything_is_written() {
    let bench = Bench::new();
    let refused = |more: &[&str], code, words: &[&str]| {
        fails(&bench, more, code, words);
        assert!(!bench.path("out").exists());
    };
    refused(
        &["data.max_length=40"],
        1,
        &[
            "the prompt and its answer do not fit",
            "rows.jsonl:",
            "plus 8 for the answer",
            "at most 40",
            "`data.max_length`",
            "`rlhf.max_completion_length`",
        ],
    );
    refused(
        &["rlhf.max_completion_length=600"],
        1,
        &["the prompt and its answer do not fit", "rows.jsonl:1"],
    );
    refused(&["rlhf.rewards=[]"], 2, &["`rlhf.rewards` is missing"]);
    refused(
        &["rlhf.rewards=nice", "rlhf.reward_weights=[]"],
        2,
        &["this reward does not exist", "`nice`", "numeric"],
    );
    refused(
        &["rlhf.rewards=regex:(", "rlhf.reward_weights=[]"],
        2,
        &["is not valid", "expected a regular expression", "cause: "],
    );
    refused(
        &["rlhf.rewards=json:gone.json", "rlhf.reward_weights=[]"],
        1,
        &["gone.json"],
    );
    refused(
        &["rlhf.rewards=length:8", "rlhf.reward_weights=[]"],
        2,
        &["below `rlhf.max_completion_length`"],
    );
    refused(
        &["rlhf.rewards=model:model", "rlhf.reward_weights=[]"],
        1,
        &["not contain a reward model", "score.weight"],
    );
    // A model of the stage `reward` can score answers, but a run cannot start from it.
    let judge = [
        "train.stage=reward",
        "data.train=pairs.jsonl",
        "train.max_steps=1",
        "tune.method=full",
    ];
    bench.train(&[&judge[..], &["train.output_dir=judge"]].concat());
    refused(&["model.path=judge/final"], 1, &["reward model", "judge/final"]);
    bench.train(&settings(
        &[],
        &[
            "rlhf.rewards=model:judge/final",
            "rlhf.reward_weights=[]",
            "train.max_steps=1",
            "train.output_dir=judged",
        ],
    ));
    assert!(bench.steps("judged")[0]["reward_model"].is_number());
    fs::write(bench.path("schema.json"), "{\"if\": {}}").unwrap();
    refused(
        &["rlhf.rewards=json:schema.json", "rlhf.reward_weights=[]"],
        1,
        &["keyword `if`", "schema.json"],
    );
    fs::write(bench.path("bare.jsonl"), "{\"prompt\": \"one and one?\"}\n").unwrap();
    let bare = ["data.train=bare.jsonl", "rlhf.reward_weights=[]"];
    refused(
        &[&bare[..], &["rlhf.rewards=exact"]].concat(),
        1,
        &["needs the right answer", "bare.jsonl:1", "`answer`"],
    );
    fs::write(bench.path("none.jsonl"), "{\"heading\": \"one and one?\"}\n").unwrap();
    refused(
        &["data.train=none.jsonl", "data.format=prompt"],
        1,
        &["cannot determine which column is the prompt", "none.jsonl:1", "heading"],
    );
    // Rows with a prompt and a separate answer column are valid.
    fs::write(
        bench.path("sums.jsonl"),
        "{\"prompt\": \"one and one?\", \"solution\": 2}\n{\"prompt\": [{\"role\": \"user\", \"content\": \"2+2\"}], \"solution\": [\"4\", \"four\"]}\n",
    )
    .unwrap();
    bench.train(&settings(
        &[],
        &[
            "data.train=sums.jsonl",
            "rlhf.rewards=[\"exact\", \"numeric\"]",
            "rlhf.answer_column=solution",
            "train.max_steps=1",
            "train.output_dir=sums",
        ],
    ));
}

#[cfg(unix)]
#[test]
fn a_program_judges_and_what_it_does_wrong_loses_nothing() {
    let bench = Bench::new();
    // The program receives the row and the answer; one process handles all requests.
    fs::write(
        bench.path("judge.sh"),
        "n=0\nwhile read -r line; do n=$((n+1)); case \"$line\" in *completion*finished*) echo $n;; *) echo no;; esac; done\n",
    )
    .unwrap();
    let judged = [
        "rlhf.rewards=program:sh judge.sh",
        "rlhf.reward_weights=[]",
        "train.max_steps=3",
    ];
    bench.train(&settings(&judged, &["train.output_dir=run"]));
    let rewards: Vec<f64> = bench.steps("run").iter().map(|l| number(l, "reward_program")).collect();
    assert_eq!(rewards, [2.5, 6.5, 10.5]);

    let broken = |script: &str, words: &[&str]| {
        fs::write(bench.path("broken.sh"), script).unwrap();
        let started = Instant::now();
        fails(
            &bench,
            &[
                "rlhf.rewards=program:sh broken.sh",
                "rlhf.reward_weights=[]",
                "rlhf.reward_timeout=0.5",
                "rlhf.reward_restarts=1",
                "train.max_steps=4",
                "train.save_steps=1",
            ],
            1,
            words,
        );
        assert!(started.elapsed() < Duration::from_secs(60));
    };
    broken(
        "echo out of paper >&2\nexit 7\n",
        &["ended before", "row 1 of 4", "out of paper", "7"],
    );
    broken(
        "echo thinking >&2\nsleep 600\n",
        &["not write a score in time", "thinking", "rlhf.reward_timeout"],
    );
    broken(
        "while read -r line; do echo good; done\n",
        &["not a score", "good", "a number"],
    );
    assert!(!bench.path("out/checkpoint-1").exists());
    // The program fails in the third rollout permanently: the two steps before are saved and can be resumed.
    broken(
        "n=$(cat asked 2>/dev/null || echo 0)\nwhile read -r line; do n=$((n+1)); echo $n > asked; \
         if [ $n -gt 8 ]; then echo tired >&2; exit 1; fi; echo $n; done\n",
        &["tired"],
    );
    assert!(bench.path("out/checkpoint-2/manifest.json").exists());
    fs::write(bench.path("broken.sh"), "while read -r line; do echo 1; done\n").unwrap();
    bench.train(&settings(
        &[],
        &[
            "rlhf.rewards=program:sh broken.sh",
            "rlhf.reward_weights=[]",
            "rlhf.reward_timeout=0.5",
            "rlhf.reward_restarts=1",
            "train.max_steps=4",
            "train.save_steps=1",
            "train.output_dir=out",
            "--resume",
        ],
    ));
    assert_eq!(bench.steps("out").len(), 4);
}

#[cfg(unix)]
#[test]
fn answers_without_a_score_are_counted_and_told_once() {
    let bench = Bench::new();
    // Four answers in a rollout: all of the first have a score, then one of four.
    let script = "n=0\nwhile read -r line; do n=$((n+1)); \
                  if [ $n -gt 4 ] && [ $((n%4)) -ne 0 ]; then echo null; else echo $n; fi; done\n";
    fs::write(bench.path("judge.sh"), script).unwrap();
    let judged = ["rlhf.rewards=program:sh judge.sh", "rlhf.reward_weights=[]"];
    for stage in ["train.stage=grpo", "train.stage=ppo"] {
        let run = ["train.max_steps=3", "train.output_dir=run", "--overwrite", stage];
        let out = bench.ft(&[&["train", "--recipe", "r.toml"], &settings(&judged, &run)[..]].concat());
        assert!(out.status.success(), "{}", said(&out));
        assert_eq!(said(&out).matches("no reward gave a score to 3 of the 4").count(), 1);
        let steps = bench.steps("run");
        let unscored: Vec<Option<f64>> = steps.iter().map(|l| l["completions_unscored"].as_f64()).collect();
        assert_eq!(unscored, [None, Some(0.75), Some(0.75)], "{stage}");
    }
}

/// Row W8.
/// The rights of a reward program: docs/rlhf.md. It writes what it sees to a file.
#[test]
fn a_reward_program_has_no_network_and_no_secrets() {
    let bench = Bench::new();
    fs::write(
        bench.path("judge.sh"),
        "echo \"${HF_TOKEN:-none} ${PLAIN:-none} $(ulimit -d) $(ulimit -c)\" >seen\nwhile read -r line; do echo 1; done\n",
    )
    .unwrap();
    let seen = |more: &[&str]| {
        let way = [
            &[
                "rlhf.rewards=program:sh judge.sh",
                "rlhf.reward_weights=[]",
                "train.max_steps=1",
            ][..],
            more,
        ]
        .concat();
        let all = settings(&way, &["train.output_dir=run", "--overwrite"]);
        let mut command = bench.command(&[&["train", "--recipe", "r.toml"][..], &all].concat());
        let out = command.env("HF_TOKEN", "secret").env("PLAIN", "yes").output().unwrap();
        assert!(out.status.success(), "{}", crate::bench::said(&out));
        fs::read_to_string(bench.path("seen")).unwrap()
    };
    let limited = seen(&["rlhf.reward_memory=1GiB"]);
    assert_eq!(limited, "none yes 1048576 0\n");
    let free: Vec<String> = seen(&["rlhf.reward_network=true"])
        .split(' ')
        .map(str::to_string)
        .collect();
    assert!(
        free[0] == "secret" && free[1] == "yes" && free[2].parse::<u64>().is_ok(),
        "{free:?}"
    );
}

#[cfg(target_os = "linux")]
/// Row W8. What Linux shows of ft to other programs of the user, also to root.
#[test]
fn a_reward_program_finds_no_secret_in_what_the_system_shows_of_ft() {
    use std::process::Stdio;
    let bench = Bench::new();
    // With Landlock the program can open the file only for a privileged user, so the test reads it too, while the program waits.
    let script = "if cat /proc/$PPID/environ >part; then mv part seen; fi\ntouch waits\nwhile [ ! -e go ]; do sleep 0.01; done\n\
                  while read -r line; do echo 1; done\n";
    fs::write(bench.path("judge.sh"), script).unwrap();
    let way = [
        "rlhf.rewards=program:sh judge.sh",
        "rlhf.reward_weights=[]",
        "train.max_steps=1",
    ];
    let all = settings(&way, &["train.output_dir=run"]);
    let mut command = bench.command(&[&["train", "--recipe", "r.toml"][..], &all].concat());
    let secrets = [("HF_TOKEN", "planted-1"), ("A_URL", "http://me:planted-2@x")];
    command.envs(secrets).env("PLAIN", "yes");
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let start = Instant::now();
    let waits = || bench.path("waits").exists();
    while !waits() && child.try_wait().unwrap().is_none() && start.elapsed() < Duration::from_secs(120) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let shown = fs::read(format!("/proc/{}/environ", child.id()));
    fs::write(bench.path("go"), "").unwrap();
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success() && waits(), "{}", said(&out));
    for seen in [Some(shown.unwrap()), fs::read(bench.path("seen")).ok()]
        .into_iter()
        .flatten()
    {
        let seen = String::from_utf8_lossy(&seen);
        assert!(seen.contains("HF_TOKEN=\0") && seen.contains("PLAIN=yes\0"), "{seen}");
        assert!(!seen.contains("planted"), "{seen}");
    }
}

/// Row W8. The recipe may come from somebody else.
#[test]
fn a_reward_program_is_named_before_it_starts_and_only_a_run_starts_it() {
    let bench = Bench::new();
    fs::write(
        bench.path("judge.sh"),
        "touch started\nwhile read -r line; do echo 1; done\n",
    )
    .unwrap();
    let way = |program: &'static str| {
        [
            program,
            "rlhf.reward_weights=[]",
            "train.max_steps=1",
            "rlhf.reward_memory=1GiB",
        ]
    };
    let run = |command: &[&str], program: &'static str, network: &str| {
        let all = settings(&way(program), &["train.output_dir=run", "--overwrite", network]);
        let all = all
            .into_iter()
            .filter(|word| command[0] == "train" || *word != "--overwrite");
        bench.ft(&command
            .iter()
            .copied()
            .chain(["--recipe", "r.toml"])
            .chain(all)
            .collect::<Vec<_>>())
    };
    let (program, own) = (
        "rlhf.rewards=program:sh judge.sh --password planted",
        "rlhf.reward_network=false",
    );
    for command in [&["plan"][..], &["data"], &["train", "--dry-run"]] {
        let out = run(command, program, own);
        assert!(out.status.success(), "{command:?}\n{}", said(&out));
        assert!(!bench.path("started").exists(), "{command:?}");
    }
    let others = "rlhf.reward_network=true";
    for (network, rights) in [
        (own, "without network, without variables that hold secrets"),
        (others, "with network and all variables of the environment"),
    ] {
        // The second run has to start it too.
        let _ = fs::remove_file(bench.path("started"));
        let out = run(&["train"], program, network);
        let text = said(&out);
        assert!(out.status.success() && bench.path("started").exists(), "{text}");
        let rights = format!("{rights}, with at most 1.0 GiB of memory; it can read and write your files");
        let line = format!("starts `sh judge.sh --password <secret>` {rights}");
        assert!(text.contains(&line), "{text}");
        let events = bench.lines("run/events.jsonl");
        let event = events.iter().rfind(|event| event["event"] == "reward_program").unwrap();
        assert_eq!(event["program"], "sh judge.sh --password <secret>");
        assert_eq!(event["rights"], rights);
    }
    let text = said(&run(&["train"], "rlhf.rewards=program:no-such-program x", own));
    let at = |words: &str| {
        text.find(words)
            .unwrap_or_else(|| panic!("`{words}` is not in:\n{text}"))
    };
    assert!(at("starts `no-such-program x`") < at("cannot be started"), "{text}");
}

/// Row W8. After a second Ctrl-C no `Drop` runs in ft, and after SIGKILL nothing at all; then the children of the program stay.
#[test]
fn a_reward_program_does_not_outlive_ft() {
    let lives = |id: i32| {
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        state.is_some_and(|state| !"ZX".contains(state))
    };
    for (signals, whole_group) in [(&[libc::SIGINT, libc::SIGINT][..], true), (&[libc::SIGKILL][..], false)] {
        let bench = Bench::new();
        let script = "sleep 600 & echo $$ $! >ids.new; mv ids.new ids; exec sleep 600\n";
        fs::write(bench.path("judge.sh"), script).unwrap();
        let mut child = bench.start(&settings(
            &["rlhf.rewards=program:sh judge.sh", "rlhf.reward_weights=[]"],
            &["train.max_steps=2", "train.output_dir=run"],
        ));
        let start = Instant::now();
        while !bench.path("ids").exists() && start.elapsed() < Duration::from_secs(120) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let ids = fs::read_to_string(bench.path("ids")).unwrap();
        let ids: Vec<i32> = ids.split_whitespace().map(|id| id.parse().unwrap()).collect();
        let before = [lives(ids[0]), lives(ids[1])];
        for signal in signals {
            // SAFETY: the process is a child of this test and was not waited for.
            unsafe { libc::kill(child.id() as i32, *signal) };
            std::thread::sleep(Duration::from_millis(10));
        }
        child.wait().unwrap();
        let left = || lives(ids[0]) || (whole_group && lives(ids[1]));
        let start = Instant::now();
        while left() && start.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let left = left();
        // SAFETY: the group of the program, if something of it is left; touches no memory.
        unsafe { libc::kill(-ids[0], libc::SIGKILL) };
        assert!(before == [true, true] && !left, "{signals:?}: {before:?}");
    }
}

/// Row S3: an evaluation that fails loses no step: the state after its step is saved, and a resume makes up for it.
#[test]
fn an_evaluation_that_fails_loses_no_step() {
    let bench = Bench::new();
    let row = "{\"messages\": [{\"role\": \"user\", \"content\": \"EVAL\"}, {\"role\": \"assistant\", \"content\": \"Yes.\"}]}\n";
    fs::write(bench.path("eval.jsonl"), row).unwrap();
    // It refuses the evaluation after the first step, permanently.
    let refuses = "while read -r line; do case \"$line\" in *EVAL*) [ -e trained ] && exit 1;; *) touch trained;; esac; echo 1; done\n";
    let way = [
        "rlhf.rewards=program:sh judge.sh",
        "rlhf.reward_weights=[]",
        "rlhf.reward_restarts=1",
        "data.eval=eval.jsonl",
        "train.eval_steps=2",
        "train.max_steps=4",
    ];
    let run = |more: &[&str], script: &str| {
        fs::write(bench.path("judge.sh"), script).unwrap();
        let all = settings(&way, &[&["train.output_dir=run"][..], more].concat());
        let all: Vec<&str> = all.into_iter().collect();
        bench.ft(&[&["train", "--recipe", "r.toml"][..], &all].concat())
    };
    let out = run(&[], refuses);
    let text = said(&out);
    assert!(
        out.status.code() == Some(1) && text.contains("the state after step 2 is saved"),
        "{text}"
    );
    assert!(bench.path("run/checkpoint-2/manifest.json").exists());
    let out = run(&["--resume"], "while read -r line; do echo 1; done\n");
    assert!(out.status.success(), "{}", said(&out));
    let evaluated: Vec<u64> = bench
        .lines("run/metrics.jsonl")
        .iter()
        .filter(|line| line.get("eval_reward").is_some())
        .map(|line| line["step"].as_u64().unwrap())
        .collect();
    assert_eq!(evaluated, [0, 2, 4]);
}

/// The mass that top-k cuts off is no difference between quantized and exact weights.
#[test]
fn top_k_does_not_change_the_ratios_of_quantized_rollouts() {
    let bench = Bench::new();
    let way = [
        "tune.method=full",
        "rlhf.rollout_weights=int8",
        "rlhf.rollout_correction=token_truncate",
        "rlhf.top_k=2",
    ];
    bench.train(&settings(&way, &["train.max_steps=1", "train.output_dir=cut"]));
    let steps = bench.steps("cut");
    let (ratio, apart) = (
        number(&steps[0], "rollout_ratio"),
        number(&steps[0], "rollout_log_prob_difference"),
    );
    assert!((ratio - 1.0).abs() < 0.2 && apart > 0.0 && apart < 0.2, "{}", steps[0]);
}
