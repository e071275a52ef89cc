//! The capture of a CUDA graph: recorded and refused calls, and the same rules in the software driver.

use crate::support::{flat, gpu};
use candle_core::cuda::cudarc::driver::result::stream::{begin_capture, end_capture};
use candle_core::cuda::cudarc::driver::{CudaStream, DevicePtr, sys};
use candle_core::{Device, Storage, Tensor};
use ft::ops::graph::{self, Graph};
use ft::ops::{grouped, update};
use std::process::Command;
use std::sync::Arc;
use sys::CUresult as Code;
use sys::CUstreamCaptureMode::{
    CU_STREAM_CAPTURE_MODE_RELAXED as RELAXED, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as LOCAL,
};

fn numbers(values: &[f32], device: &Device) -> Tensor {
    Tensor::new(values, device).unwrap()
}

pub fn is_soft() -> bool {
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
pub fn cases<'a, T>(all: &'a [(&'static str, T)]) -> impl Iterator<Item = &'a (&'static str, T)> {
    let own = std::env::var(CHILD).ok();
    all.iter()
        .filter(move |case| own.as_ref().is_none_or(|own| own == case.0))
}

/// Runs the test `name`, with its module, in a process of its own, with one of its cases; returns what it printed. `None`: this is that process.
pub fn alone(name: &str, fault: &str, settings: &[(&str, &str)]) -> Option<(bool, String)> {
    if std::env::var(CHILD).is_ok() {
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]);
    let out = command
        .env(CHILD, fault)
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    // A wrong name would pass.
    assert!(
        String::from_utf8_lossy(&out.stdout).contains("running 1 test"),
        "{name}"
    );
    Some((out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned()))
}

/// A fault that a real driver does not see ends the process.
#[test]
fn the_software_driver_stops_uses_of_memory_of_a_graph() {
    let name = "captures::the_software_driver_stops_uses_of_memory_of_a_graph";
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
