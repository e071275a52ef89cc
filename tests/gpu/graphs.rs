//! Decoding with CUDA graphs has the bits of decoding without.

use crate::captures::{alone, cases, is_soft};
use crate::families::model;
use crate::support::{gpu, short};
use candle_core::Device;
use ft::generate::{
    Answer, CopyFormats, GenerateLimits, GenerateSettings, KvDtype, QuantizedCopy, Request, SampledModel, Session,
    answer,
};
use ft::hf;
use ft::model::Network;
use ft::ops::{graph, oracle, update};
use ft::peft::LoraConfig;
use ft::quant::Format;
use ft::recipe::Dtype;
use std::path::Path;
use tempfile::TempDir;

fn network(dtype: Dtype, device: &Device) -> Network {
    let root = std::env::var("FT_ROOT").unwrap_or_else(|_| env!("CARGO_MANIFEST_DIR").to_string());
    let opened = hf::open(&Path::new(&root).join("assets/tiny"), dtype, device).unwrap();
    opened.model.network
}

fn text(seed: u32, n: u32) -> Vec<u32> {
    (0..n).map(|i| 5 + (i * 31 + seed * 7) % 90).collect()
}

/// Prompts with a common beginning, and one whose answer passes the border between two pieces of attention (256 tokens).
fn requests(long: u32) -> Vec<Request> {
    let with = |more: Vec<u32>| [text(1, 40), more].concat();
    let prompts = [with(text(2, 5)), text(5, long), with(text(3, 30)), text(4, 3)];
    let numbered = prompts.into_iter().zip(0..);
    numbered.map(|(prompt, number)| Request { prompt, number }).collect()
}

/// Answers with and without graphs: equal to the bit. Returns them, and how many steps were graphs.
fn same<'a>(
    model: impl Into<SampledModel<'a>>,
    requests: &[Request],
    settings: &GenerateSettings,
    what: &str,
) -> (Vec<Answer>, u64) {
    let model = model.into();
    let of = |graphs| {
        let mut settings = settings.clone();
        settings.limits.graphs_after = graphs;
        answer(model, requests, &settings, &mut |_, _| Ok(())).unwrap()
    };
    let ((want, plain), (got, speed)) = (of(None), of(settings.limits.graphs_after));
    assert_eq!(plain.graph_steps, 0);
    for (got, want) in got.iter().zip(&want) {
        let bits = |a: &Answer| a.log_probs.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!((&got.ids, got.finished), (&want.ids, want.finished), "{what}");
        assert_eq!(bits(got), bits(want), "{what}");
    }
    assert_eq!(graph::take_refusal(), None, "{what}");
    (got, speed.graph_steps)
}

fn settings(kv_cache: Option<KvDtype>, temperature: f32) -> GenerateSettings {
    GenerateSettings {
        max_new_tokens: if short() { 9 } else { 24 },
        temperature,
        seed: 3,
        limits: GenerateLimits {
            kv_cache,
            // Rows that end are replaced.
            rows: 2,
            graphs_after: Some(2),
            ..GenerateLimits::default()
        },
        ..GenerateSettings::default()
    }
}

#[test]
fn answers_are_those_without_graphs() {
    let Some(gpu) = gpu() else { return };
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let network = network(dtype, &gpu.device);
        for kv_cache in [None, Some(KvDtype::Bf16), Some(KvDtype::Int8)] {
            for temperature in [0.0, 0.8] {
                let what = format!("{dtype:?} {kv_cache:?} {temperature}");
                let (answers, steps) = same(&network, &requests(251), &settings(kv_cache, temperature), &what);
                assert!(steps >= 8, "{what}: {steps}");
                // Rows that end at a token of their own, at different times.
                let stop = answers.iter().map(|a| a.ids[a.ids.len() / 2]).collect();
                let stopped = GenerateSettings {
                    stop_ids: stop,
                    ..settings(kv_cache, temperature)
                };
                same(&network, &requests(251), &stopped, &what);
            }
        }
        // All rows together, tokens that are sampled on the host, and always the same sums.
        let together = |change: &dyn Fn(&mut GenerateSettings)| {
            let mut settings = settings(None, 0.8);
            settings.limits.rows = 64;
            change(&mut settings);
            same(&network, &requests(251), &settings, "together").1
        };
        assert!(together(&|_| ()) >= 6);
        assert!(together(&|s| s.top_p = Some(0.9)) >= 6);
        assert!(together(&|s| s.limits.same_bits = true) >= 6);
    }
}

/// Eight rows pass the border between two pieces of attention: their lists outgrow the room of the first graph.
#[test]
fn a_graph_is_captured_again_when_the_lists_grow() {
    let Some(gpu) = gpu() else { return };
    let network = network(Dtype::Bf16, &gpu.device);
    let rows = (0..9).map(|row| Request {
        prompt: text(row, 252),
        number: row.into(),
    });
    let rows = rows.collect::<Vec<_>>();
    // The fifth of eight steps passes the border. Then the graph was at least as many steps as ran before it, or only one.
    for (after, graphs) in [(1, 7), (3, 2)] {
        let settings = GenerateSettings {
            max_new_tokens: 9,
            limits: GenerateLimits {
                rows: 9,
                share_prefixes: false,
                graphs_after: Some(after),
                ..GenerateLimits::default()
            },
            ..settings(None, 0.8)
        };
        assert_eq!(same(&network, &rows, &settings, "lists").1, graphs, "{after}");
    }
}

/// A capture takes as long as several steps, so the first steps of a shape run as they are.
#[test]
fn steps_are_counted_before_a_capture() {
    let Some(gpu) = gpu() else { return };
    let network = network(Dtype::Bf16, &gpu.device);
    let request = [Request {
        prompt: text(1, 20),
        number: 0,
    }];
    // The first of nine tokens comes from the prompt.
    for (after, graphs) in [(1, 7), (4, 4), (8, 0), (16, 0)] {
        let mut settings = settings(None, 0.0);
        (settings.max_new_tokens, settings.limits.graphs_after) = (9, Some(after));
        assert_eq!(same(&network, &request, &settings, "steps").1, graphs, "{after}");
    }
    // Two rows with answers of different lengths: the size changes after five steps.
    let two = [0, 1].map(|row| Request {
        prompt: text(row, 20),
        number: row.into(),
    });
    let with = |after, stop_ids| {
        let mut settings = settings(None, 0.8);
        (settings.max_new_tokens, settings.limits.graphs_after, settings.stop_ids) = (9, Some(after), stop_ids);
        same(&network, &two, &settings, "two rows")
    };
    let (free, _) = with(16, Vec::new());
    // A token at which only the first row ends.
    let ends = |at: &usize| {
        let id = free[0].ids[*at];
        !free[0].ids[..*at].contains(&id) && !free[1].ids.contains(&id)
    };
    let at = (3..6).find(ends).expect("a token of one row");
    let (answers, steps) = with(2, vec![free[0].ids[at]]);
    assert_eq!(answers.iter().map(|a| a.ids.len()).collect::<Vec<_>>(), [at + 1, 9]);
    // Two steps of each shape run as they are.
    assert_eq!(steps as usize, (at - 2) + (8 - at).saturating_sub(2));
}

#[test]
fn a_text_that_outgrows_its_block_is_that_without_graphs() {
    let Some(gpu) = gpu() else { return };
    let network = network(Dtype::Bf16, &gpu.device);
    let of = |graphs_after| {
        let (mut session, mut prompt, mut out, mut steps) = (Session::default(), text(1, 60), Vec::new(), 0);
        for turn in 0..3 {
            let settings = GenerateSettings {
                max_new_tokens: 12,
                limits: GenerateLimits {
                    graphs_after,
                    ..GenerateLimits::default()
                },
                ..GenerateSettings::default()
            };
            let request = Request {
                prompt: prompt.clone(),
                number: 0,
            };
            let (answer, speed) = session
                .answer(&network, &request, &settings, &mut |_, _| Ok(()))
                .unwrap();
            prompt.extend(&answer.ids);
            prompt.extend(text(turn, 50));
            steps += speed.graph_steps;
            out.push(answer);
        }
        (out, steps)
    };
    let ((want, none), (got, steps)) = (of(None), of(Some(2)));
    assert_eq!(got, want);
    assert!(none == 0 && steps >= 20, "{steps}");
}

#[test]
fn families_answer_as_without_graphs() {
    let Some(gpu) = gpu() else { return };
    let dir = TempDir::new().unwrap();
    // Keys of other layers and windows, per-layer inputs and streams, joined projections, norms after the halves, latent rows,
    // states of layers; then experts, which have no graph.
    for (family, graphs) in [
        ("gemma4_text_shared", true),
        ("gemma3n_text", true),
        ("phi3", true),
        ("olmo2", true),
        ("minicpm3", true),
        ("lfm2", true),
        ("qwen3_5", true),
        ("qwen3_moe", false),
    ] {
        let folder = model(family, dir.path());
        let network = hf::open(&folder, Dtype::Bf16, &gpu.device).unwrap().model.network;
        let (_, steps) = same(&network, &requests(40), &settings(None, 0.8), family);
        assert_eq!(steps > 0, graphs, "{family}: {steps}");
        // Rows of padding have states too.
        if ["lfm2", "qwen3_5"].contains(&family) {
            let mut settings = settings(None, 0.8);
            settings.limits.same_bits = true;
            let (_, steps) = same(&network, &requests(40), &settings, family);
            assert!(steps > 0, "{family} with the same bits");
        }
    }
}

#[test]
fn quantized_copies_and_adapters_answer_as_without_graphs() {
    let Some(gpu) = gpu() else { return };
    for format in [
        Format::Int8 { group: 0 },
        Format::Int4 { group: 64 },
        Format::Nf4 { double: true },
    ] {
        let network = network(Dtype::Bf16, &gpu.device);
        let copy = QuantizedCopy::new(&network, CopyFormats::of(format)).unwrap();
        let (_, steps) = same(&copy, &requests(251), &settings(None, 0.8), &format.to_string());
        assert!(steps > 0, "{format}");
    }
    for use_dora in [false, true] {
        let mut network = network(Dtype::Bf16, &gpu.device);
        let lora = LoraConfig {
            use_dora,
            ..LoraConfig::default()
        };
        let mut adapters = hf::adapters_to_fill(&lora, &network.spec, None, 0).unwrap();
        adapters.attach(&mut network).unwrap();
        for part in network.adapters.values().flat_map(|adapter| adapter.parts()) {
            let start = if part.name.contains("magnitude") { 1.0 } else { 0.0 };
            let small = oracle::random(part.tensor.shape(), 1).affine(0.05, start).unwrap();
            update::add_assign(&part.tensor, &small.to_device(&gpu.device).unwrap()).unwrap();
        }
        let (_, steps) = same(&network, &requests(251), &settings(None, 0.8), "LoRA");
        assert!(steps > 0, "{use_dora}");
    }
}

/// The memory of a generation is free after it, that of its graphs too.
#[test]
fn generations_leave_no_memory_of_graphs() {
    let Some(gpu) = gpu() else { return };
    let network = network(Dtype::Bf16, &gpu.device);
    let mut used = Vec::new();
    for _ in 0..4 {
        let (_, speed) = answer(&network, &requests(251), &settings(None, 0.8), &mut |_, _| Ok(())).unwrap();
        assert!(speed.graph_steps > 0);
        gpu.device.synchronize().unwrap();
        used.push(ft::ops::device::memory(&gpu.device).unwrap().unwrap().used);
        let (now, most) = graph::memory(&gpu.device).unwrap();
        assert!(now == 0 && most > 0, "{now} {most}");
    }
    assert!(used[1..].iter().all(|u| *u == used[1]), "{used:?}");
}

/// A device that refuses graphs gives the same answers, and the reason is known.
#[test]
fn without_graphs_of_the_driver_answers_are_the_same() {
    let name = "graphs::without_graphs_of_the_driver_answers_are_the_same";
    let Some(gpu) = gpu() else { return };
    if !is_soft() {
        return eprintln!("skipped: on the software driver only");
    }
    let settings_of = [
        ("refused", ("SOFT_CUDA_REFUSE_GRAPHS", "1", true)),
        ("off", ("FT_CUDA_GRAPHS", "0", false)),
        ("in step", ("FT_CUDA_SYNC", "1", false)),
    ];
    for (case, (variable, value, noted)) in cases(&settings_of) {
        if let Some((passed, said)) = alone(name, case, &[(variable, value)]) {
            assert!(passed, "{case}: {said}");
            continue;
        }
        let network = network(Dtype::Bf16, &gpu.device);
        let of = |graphs| {
            let mut settings = settings(None, 0.8);
            settings.limits.graphs_after = graphs;
            answer(&network, &requests(251), &settings, &mut |_, _| Ok(())).unwrap()
        };
        let ((want, _), (got, speed)) = (of(None), of(Some(1)));
        assert_eq!(got, want);
        assert_eq!(speed.graph_steps, 0);
        assert_eq!(graph::take_refusal().is_some(), *noted);
        return;
    }
}
