//! CUDA graphs: what a capture records, what the driver refuses in one, and decoding with graphs, which has the bits of decoding
//! without.

use crate::families::model;
use crate::support::{flat, gpu, short};
use candle_core::cuda::cudarc::driver::result::stream::{begin_capture, end_capture};
use candle_core::cuda::cudarc::driver::{CudaStream, DevicePtr, sys};
use candle_core::{Device, Storage, Tensor};
use ft::generate::{Answer, Formats, KvDtype, Limits, QuantizedCopy, Request, SampledModel, Session, Settings, answer};
use ft::hf;
use ft::model::Network;
use ft::ops::graph::{self, Graph};
use ft::ops::{grouped, oracle, update};
use ft::peft::LoraConfig;
use ft::quant::Format;
use ft::recipe::Dtype;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use sys::CUresult as Code;
use sys::CUstreamCaptureMode::{
    CU_STREAM_CAPTURE_MODE_RELAXED as RELAXED, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as LOCAL,
};
use tempfile::TempDir;

fn numbers(values: &[f32], device: &Device) -> Tensor {
    Tensor::new(values, device).unwrap()
}

fn is_soft() -> bool {
    ft::ops::device::gpus().unwrap()[0].name == "software CUDA driver"
}

fn stream(device: &Device) -> Arc<CudaStream> {
    match device {
        Device::Cuda(device) => device.cuda_stream(),
        _ => panic!("not a GPU"),
    }
}

fn address(x: &Tensor) -> u64 {
    match &*x.storage_and_layout().0 {
        Storage::Cuda(s) => {
            let slice = s.as_cuda_slice::<f32>().unwrap();
            slice.device_ptr(slice.stream()).0
        }
        _ => panic!("not on a GPU"),
    }
}

#[test]
fn a_graph_computes_again_from_what_is_in_its_inputs() {
    let Some(gpu) = gpu() else { return };
    let (x, y) = (numbers(&[1.0, 2.0, 3.0], &gpu.device), numbers(&[0.0; 3], &gpu.device));
    let work = |factor: f32| {
        // Two tensors of the graph, the second in the memory of the first.
        let sum = update::add(&x, &x)?;
        let other = update::add(&sum, &x)?;
        drop(sum);
        update::scale_assign(&other, factor)?;
        graph::overwrite(&y, &other)
    };
    work(1.0).unwrap();
    assert_eq!(flat(&y), [3.0, 6.0, 9.0]);
    let mut factor = 10.0;
    let graph = Graph::capture(&gpu.device, || work(factor)).unwrap().unwrap();
    // Nothing has run, and the number of the launch is that of the capture.
    factor += 1.0;
    assert_eq!(flat(&y), [3.0, 6.0, 9.0]);
    for (round, start) in [1.0f32, 5.0, -2.0].into_iter().enumerate() {
        graph::overwrite(&x, &numbers(&[start, 0.0, factor], &gpu.device)).unwrap();
        graph.launch().unwrap();
        assert_eq!(flat(&y), [30.0 * start, 0.0, 330.0], "{round}");
    }
    // Without a copy in between: launches come one after the other.
    let again = Graph::capture(&gpu.device, || update::add_assign(&y, &x))
        .unwrap()
        .unwrap();
    graph.launch().unwrap();
    again.launch().unwrap();
    again.launch().unwrap();
    drop((graph, again));
    assert_eq!(flat(&y), [-64.0, 0.0, 352.0]);
    assert!(graph::memory(&gpu.device).unwrap().1 > 0);
    graph::release_memory(&gpu.device).unwrap();
    assert_eq!(graph::memory(&gpu.device).unwrap().0, 0);
}

#[test]
fn what_needs_the_host_cannot_be_captured() {
    let Some(gpu) = gpu() else { return };
    let device = &gpu.device;
    let x = numbers(&[1.0, 2.0], device);
    let tries: [(&str, &dyn Fn() -> ft::base::Result<()>); 3] = [
        ("a wait", &|| Ok(device.synchronize()?)),
        ("a result on the host", &|| update::to_f32_vec(&x).map(|_| ())),
        ("numbers of the host", &|| {
            // Uploads a table.
            grouped::bias_rows(&[(&x, 1)], None).map(|_| ())
        }),
    ];
    for (name, work) in tries {
        work().unwrap();
        graph::take_refusal();
        assert!(Graph::capture(device, work).unwrap().is_none(), "{name}");
        let why = graph::take_refusal().unwrap();
        assert!(why.contains("CAPTURE") || why.contains("capture"), "{name}: {why}");
        // The device goes on.
        update::scale_assign(&x, 1.0).unwrap();
        assert_eq!(flat(&x), [1.0, 2.0], "{name}");
    }
    update::add(&x, &x).unwrap();
    // A tensor that is kept would have an address of the graph.
    let mut kept = None;
    let captured = Graph::capture(device, || {
        kept = Some(update::add(&x, &x)?);
        Ok(())
    });
    assert!(captured.unwrap().is_none());
    assert!(graph::take_refusal().unwrap().contains("outlives the graph"));
    drop(kept);
    // Its free is refused, which candle's context reports at its next call.
    let _ = stream(device).context().check_err();
    assert_eq!(flat(&x), [1.0, 2.0]);
}

/// The rules of the driver, with the calls themselves.
#[test]
fn the_software_driver_has_the_rules_of_a_capture() {
    let Some(gpu) = gpu() else { return };
    if !is_soft() {
        return eprintln!("skipped: on the software driver only");
    }
    let main = stream(&gpu.device);
    let context = main.context().clone();
    let (one, two) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let x = numbers(&[1.0; 4], &gpu.device);
    gpu.device.synchronize().unwrap();
    let to = address(&x);
    // SAFETY: streams that live, and memory of 16 bytes.
    unsafe {
        let start = |stream: &CudaStream, mode| begin_capture(stream.cu_stream(), mode);
        let end = |stream: &CudaStream| end_capture(stream.cu_stream()).map_err(|e| e.0);
        let set = |stream: &CudaStream| sys::cuMemsetD8Async(to, 0, 16, stream.cu_stream());
        assert_eq!(end(&one), Err(Code::CUDA_ERROR_ILLEGAL_STATE));
        assert_eq!(
            sys::cuStreamBeginCapture_v2(std::ptr::null_mut(), LOCAL),
            Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        );
        start(&one, LOCAL).unwrap();
        assert_eq!(start(&one, LOCAL).unwrap_err().0, Code::CUDA_ERROR_ILLEGAL_STATE);
        assert_eq!(
            format!("{:?}", one.capture_status().unwrap()),
            "CU_STREAM_CAPTURE_STATUS_ACTIVE"
        );
        end(&one).unwrap();

        // Calls that could wait or allocate at once end a capture of this thread; what follows is refused too.
        let mut address = 0;
        let mut place = std::ptr::null_mut();
        let other = context.new_event(None).unwrap();
        let calls: [(&str, &mut dyn FnMut() -> Code); 6] = [
            ("cuMemAlloc", &mut || sys::cuMemAlloc_v2(&mut address, 16)),
            ("cuMemHostAlloc", &mut || sys::cuMemHostAlloc(&mut place, 16, 0)),
            ("cuStreamSynchronize", &mut || sys::cuStreamSynchronize(one.cu_stream())),
            ("cuStreamSynchronize of another stream", &mut || {
                sys::cuStreamSynchronize(two.cu_stream())
            }),
            ("cuCtxSynchronize", &mut || sys::cuCtxSynchronize()),
            ("cuEventQuery", &mut || sys::cuEventQuery(other.cu_event())),
        ];
        for (name, call) in calls {
            start(&one, LOCAL).unwrap();
            assert_eq!(call(), Code::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "{name}");
            assert_eq!(set(&one), Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "{name}");
            assert_eq!(end(&one), Err(Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED), "{name}");
        }
        // A relaxed capture permits calls that are not about its stream.
        start(&one, RELAXED).unwrap();
        assert_eq!(sys::cuStreamSynchronize(two.cu_stream()), Code::CUDA_SUCCESS);
        end(&one).unwrap();

        // The thread that began must end.
        start(&one, LOCAL).unwrap();
        let handle = one.cu_stream() as usize;
        let elsewhere = std::thread::spawn(move || end_capture(handle as sys::CUstream).map(|_| ()).map_err(|e| e.0));
        assert_eq!(
            elsewhere.join().unwrap(),
            Err(Code::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)
        );
        assert_eq!(end(&one), Err(Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));

        // A stream joins by an event of the capture, and must be joined again.
        start(&one, LOCAL).unwrap();
        let fork = one.record_event(None).unwrap();
        two.wait(&fork).unwrap();
        assert_eq!(set(&two), Code::CUDA_SUCCESS);
        assert_eq!(end(&two), Err(Code::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED));
        assert_eq!(end(&one), Err(Code::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
        start(&one, LOCAL).unwrap();
        two.wait(&one.record_event(None).unwrap()).unwrap();
        assert_eq!(set(&two), Code::CUDA_SUCCESS);
        assert_eq!(end(&one), Err(Code::CUDA_ERROR_STREAM_CAPTURE_UNJOINED));
        start(&one, LOCAL).unwrap();
        two.wait(&one.record_event(None).unwrap()).unwrap();
        assert_eq!(set(&two), Code::CUDA_SUCCESS);
        one.wait(&two.record_event(None).unwrap()).unwrap();
        assert_eq!(set(&one), Code::CUDA_SUCCESS);
        let graph = one.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap().unwrap();
        graph.launch().unwrap();
        one.synchronize().unwrap();
        assert_eq!(flat(&x), [0.0; 4]);

        // Events: one of a capture cannot be asked, one from outside cannot be waited for.
        start(&one, LOCAL).unwrap();
        let captured = one.record_event(None).unwrap();
        assert_eq!(sys::cuEventQuery(captured.cu_event()), Code::CUDA_ERROR_CAPTURED_EVENT);
        assert!(end(&one).is_err());
        other.record(&two).unwrap();
        start(&one, LOCAL).unwrap();
        assert_eq!(
            one.wait(&other).unwrap_err().0,
            Code::CUDA_ERROR_STREAM_CAPTURE_ISOLATION
        );
        assert!(end(&one).is_err());

        // Memory from outside is not freed in a capture, and not allocated twice by two instances.
        start(&one, LOCAL).unwrap();
        assert_eq!(sys::cuMemFreeAsync(to, one.cu_stream()), Code::CUDA_ERROR_INVALID_VALUE);
        assert_eq!(
            sys::cuMemAllocAsync(&mut address, 16, one.cu_stream()),
            Code::CUDA_SUCCESS
        );
        assert_eq!(sys::cuMemFreeAsync(address, one.cu_stream()), Code::CUDA_SUCCESS);
        let graph = one.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap().unwrap();
        let mut exec = std::ptr::null_mut();
        assert_eq!(
            sys::cuGraphInstantiateWithFlags(&mut exec, graph.cu_graph(), 0),
            Code::CUDA_ERROR_NOT_SUPPORTED
        );
        graph.launch().unwrap();
    }
    one.synchronize().unwrap();
}

const CHILD: &str = "FT_GPU_CHILD";

/// The cases of a test that has a process for each: in such a process only its own.
fn cases<'a, T>(all: &'a [(&'static str, T)]) -> impl Iterator<Item = &'a (&'static str, T)> {
    let own = std::env::var(CHILD).ok();
    all.iter()
        .filter(move |case| own.as_ref().is_none_or(|own| own == case.0))
}

/// Runs this test in a process of its own, with one of its cases; returns what it printed. `None`: this is that process.
fn alone(name: &str, fault: &str, settings: &[(&str, &str)]) -> Option<(bool, String)> {
    if std::env::var(CHILD).is_ok() {
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("graphs::{name}"), "--nocapture"]);
    let out = command
        .env(CHILD, fault)
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    Some((out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned()))
}

/// What a real driver does not see ends the process.
#[test]
fn the_software_driver_stops_uses_of_memory_of_a_graph() {
    let name = "the_software_driver_stops_uses_of_memory_of_a_graph";
    let Some(gpu) = gpu() else { return };
    if !is_soft() {
        return eprintln!("skipped: on the software driver only");
    }
    let faults = [
        ("outside", "is not inside of an allocation"),
        ("unordered", "no event orders them"),
    ];
    for (fault, text) in cases(&faults) {
        if let Some((passed, said)) = alone(name, fault, &[]) {
            assert!(!passed && said.contains(text), "{fault}: {said}");
            continue;
        }
        let x = numbers(&[1.0; 4], &gpu.device);
        // Kernels are loaded before a capture.
        update::scale_assign(&update::add(&x, &x).unwrap(), 1.0).unwrap();
        gpu.device.synchronize().unwrap();
        match *fault {
            "outside" => {
                let mut kept = None;
                let _ = Graph::capture(&gpu.device, || {
                    kept = Some(update::add(&x, &x)?);
                    Ok(())
                });
                let _ = update::scale_assign(&kept.unwrap(), 2.0);
            }
            _ => {
                // Two streams of a capture write the same memory.
                let one = stream(&gpu.device);
                let two = one.context().new_stream().unwrap();
                one.begin_capture(LOCAL).unwrap();
                two.wait(&one.record_event(None).unwrap()).unwrap();
                update::scale_assign(&x, 2.0).unwrap();
                let to = address(&x);
                // SAFETY: memory of 16 bytes.
                unsafe { sys::cuMemsetD8Async(to, 0, 16, two.cu_stream()) };
            }
        }
        return;
    }
}

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
    settings: &Settings,
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

fn settings(kv_cache: Option<KvDtype>, temperature: f32) -> Settings {
    Settings {
        max_new_tokens: if short() { 9 } else { 24 },
        temperature,
        seed: 3,
        limits: Limits {
            kv_cache,
            // Rows that end are replaced.
            rows: 2,
            graphs_after: Some(2),
            ..Limits::default()
        },
        ..Settings::default()
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
                let stopped = Settings {
                    stop_ids: stop,
                    ..settings(kv_cache, temperature)
                };
                same(&network, &requests(251), &stopped, &what);
            }
        }
        // All rows together, tokens that are sampled on the host, and always the same sums.
        let together = |change: &dyn Fn(&mut Settings)| {
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
        let settings = Settings {
            max_new_tokens: 9,
            limits: Limits {
                rows: 9,
                share_prefixes: false,
                graphs_after: Some(after),
                ..Limits::default()
            },
            ..settings(None, 0.8)
        };
        assert_eq!(same(&network, &rows, &settings, "lists").1, graphs, "{after}");
    }
}

/// A capture takes as long as several steps, so the first steps of a size run as they are.
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
            let settings = Settings {
                max_new_tokens: 12,
                limits: Limits {
                    graphs_after,
                    ..Limits::default()
                },
                ..Settings::default()
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
        let copy = QuantizedCopy::new(&network, Formats::of(format)).unwrap();
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
    let name = "without_graphs_of_the_driver_answers_are_the_same";
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
