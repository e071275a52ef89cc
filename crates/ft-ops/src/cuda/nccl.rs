//! NCCL: f32 numbers between the GPUs of several processes. Only sends and receives are used, so the order of sums is the
//! caller's. The library is loaded when it is asked for: a program with this code starts without it.
//!
//! Numbers come from host memory and return there, through buffers on the GPU. The stream is a separate one.

use super::Gpu;
use super::memory::failed;
use candle_core::Device;
use candle_core::cuda::cudarc::driver::{CudaStream, PinnedHostSlice, result, sys};
use ft_base::{Error, Result};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

/// The identifier that all ranks of a communicator share: an `ncclUniqueId`.
pub type NcclId = [u8; 128];

/// Numbers of the buffer on the GPU for each direction, and of page-locked memory.
pub const BUFFER: usize = 1 << 21;
/// The names of the library.
const NAMES: [&CStr; 2] = [c"libnccl.so.2", c"libnccl.so"];
/// `ncclFloat32`.
const FLOAT32: c_int = 7;
/// `ncclSuccess`, `ncclInProgress`.
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
/// Numbers in 16 bytes: NCCL copies faster between addresses that are multiples of them.
const ALIGNED: usize = 4;
/// Time between two looks at numbers in flight.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

type Handle = *mut c_void;
type Queue = *mut c_void;

/// The functions of NCCL that are used, with their types in `nccl.h`.
pub struct NcclLibrary {
    get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    comm_init_rank: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int) -> c_int,
    comm_destroy: unsafe extern "C" fn(Handle) -> c_int,
    comm_abort: unsafe extern "C" fn(Handle) -> c_int,
    comm_get_async_error: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    get_last_error: unsafe extern "C" fn(Handle) -> *const c_char,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    send: unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Handle, Queue) -> c_int,
    recv: unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Handle, Queue) -> c_int,
}

/// The text at this address, or an empty one.
///
/// # Safety
/// Null, or a text that ends with a zero and lives during the call.
unsafe fn text_at(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not null; the caller promises the rest.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// The function `name` of the library, of type `F`.
///
/// # Safety
/// `F` is the type of a pointer to this function.
unsafe fn function<F: Copy>(library: *mut c_void, name: &CStr) -> Result<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: the library is open, and is never closed.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    if found.is_null() {
        return Err(Error::unsupported("this NCCL library is too old")
            .found(format!("no function `{}`", name.to_string_lossy()))
            .expected("NCCL 2.13 or newer"));
    }
    // SAFETY: a function pointer of this size; the caller promises its type.
    Ok(unsafe { std::mem::transmute_copy(&found) })
}

impl NcclLibrary {
    /// Loads the library.
    ///
    /// # Errors
    /// There is none, or it is too old.
    pub fn load() -> Result<Self> {
        let mut why = String::new();
        for name in NAMES {
            // SAFETY: a name that ends with a zero. The library is NCCL, whose initializers do not depend on ft.
            let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            if !library.is_null() {
                return Self::of(library);
            }
            if why.is_empty() {
                // SAFETY: no argument; the text lives until the next call of this kind in this thread.
                why = unsafe { text_at(libc::dlerror()) };
            }
        }
        Err(Error::not_found("NCCL cannot be loaded").found(why).hint(
            "install NCCL (`apt-get install libnccl2`, or `pip install nvidia-nccl-cu13`) and put the folder of libnccl.so.2 into \
             LD_LIBRARY_PATH",
        ))
    }

    fn of(library: *mut c_void) -> Result<Self> {
        // SAFETY: the types are those of these names in `nccl.h`.
        unsafe {
            Ok(Self {
                get_version: function(library, c"ncclGetVersion")?,
                get_unique_id: function(library, c"ncclGetUniqueId")?,
                comm_init_rank: function(library, c"ncclCommInitRank")?,
                comm_destroy: function(library, c"ncclCommDestroy")?,
                comm_abort: function(library, c"ncclCommAbort")?,
                comm_get_async_error: function(library, c"ncclCommGetAsyncError")?,
                get_error_string: function(library, c"ncclGetErrorString")?,
                get_last_error: function(library, c"ncclGetLastError")?,
                group_start: function(library, c"ncclGroupStart")?,
                group_end: function(library, c"ncclGroupEnd")?,
                send: function(library, c"ncclSend")?,
                recv: function(library, c"ncclRecv")?,
            })
        }
    }

    /// The version, as 10000 · major + 100 · minor + patch.
    ///
    /// # Errors
    /// A library that does not answer.
    pub fn version(&self) -> Result<u32> {
        let mut version = 0;
        // SAFETY: it writes one number.
        let code = unsafe { (self.get_version)(&mut version) };
        self.check(code, std::ptr::null_mut())?;
        Ok(version.unsigned_abs())
    }

    /// A new id, for one communicator.
    ///
    /// # Errors
    /// No network interface that NCCL can use.
    pub fn id(&self) -> Result<NcclId> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: it writes 128 bytes.
        let code = unsafe { (self.get_unique_id)(&mut id) };
        self.check(code, std::ptr::null_mut())?;
        Ok(id.0)
    }

    fn check(&self, code: c_int, comm: Handle) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        // A call that returns before it has ended: what follows in the stream would not wait for it.
        if code == IN_PROGRESS {
            return Err(Error::unsupported("NCCL does not wait in its calls")
                .found("a communicator that does not block")
                .hint("unset NCCL_COMM_BLOCKING, or set it to 1"));
        }
        // SAFETY: any code has a text, and the last error is also that of no communicator.
        let (what, last) = unsafe {
            (
                text_at((self.get_error_string)(code)),
                text_at((self.get_last_error)(comm)),
            )
        };
        let error = Error::device("NCCL has failed", &last).found(what);
        let error = if last.is_empty() {
            error
        } else {
            error.cause(last.trim())
        };
        Err(error.hint("NCCL_DEBUG=INFO prints what NCCL does"))
    }
}

/// Formats `22803` as `2.28.3`.
pub fn version_text(version: u32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// The resources of a communicator on its own GPU.
pub struct NcclResources {
    library: NcclLibrary,
    stream: Arc<CudaStream>,
    buffer: GpuBuffer,
    host: PinnedHostSlice<u8>,
}

/// The GPUs of all ranks, seen from one of them.
pub struct Communicator {
    library: NcclLibrary,
    comm: Handle,
    rank: usize,
    size: usize,
    stream: Arc<CudaStream>,
    /// f32 `[2, BUFFER]` on the GPU: the sent numbers, and the received ones. Not from the pool of tensors, so it is not part of their
    /// limit.
    buffer: GpuBuffer,
    /// The same in host memory, in bytes.
    host: PinnedHostSlice<u8>,
    /// An exchange has begun, and did not end well.
    broken: bool,
}

/// Memory of a GPU, by its address.
struct GpuBuffer(u64);

impl Drop for GpuBuffer {
    fn drop(&mut self) {
        // SAFETY: it was allocated by `NcclResources::new`; its stream has finished.
        let _ = unsafe { result::free_sync(self.0) };
    }
}

/// Memory that cannot be allocated.
fn no_memory(what: &str) -> impl Fn(result::DriverError) -> Error {
    let what = format!("{what} for the exchange between GPUs cannot be allocated");
    move |e| {
        Error::device(&what, &format!("{e:?}"))
            .found(format!("{} MiB", (8 * BUFFER) >> 20))
            .cause(e)
    }
}

impl NcclResources {
    /// Allocates the buffers. All that can fail on one rank alone is here, because `join` waits for every rank.
    ///
    /// # Errors
    /// Too little memory.
    pub fn new(library: NcclLibrary, device: &Device) -> Result<Self> {
        let gpu = Gpu::on(device)?;
        let context = gpu.device().cuda_stream().context().clone();
        let stream = context.new_stream().map_err(failed)?;
        context.bind_to_thread().map_err(failed)?;
        // SAFETY: the address is used by copies and exchanges only.
        let buffer = unsafe { result::malloc_sync(8 * BUFFER) }.map_err(no_memory("memory of the GPU"))?;
        let buffer = GpuBuffer(buffer);
        // SAFETY: it is filled below.
        let host = unsafe { context.alloc_pinned_with_flags::<u8>(8 * BUFFER, 0) };
        let mut host = host.map_err(no_memory("page-locked memory"))?;
        host.as_mut_slice().map_err(failed)?.fill(0);
        Ok(Self {
            library,
            stream,
            buffer,
            host,
        })
    }

    /// Connects the GPU of this rank to those of the others. Waits until all ranks of the id call it, without a limit of time.
    ///
    /// # Errors
    /// NCCL cannot connect them.
    pub fn join(self, (rank, size): (usize, usize), id: NcclId) -> Result<Communicator> {
        let mut comm = std::ptr::null_mut();
        self.stream.context().bind_to_thread().map_err(failed)?;
        // SAFETY: it writes one handle; the context of the GPU is that of this thread.
        let code = unsafe { (self.library.comm_init_rank)(&mut comm, size as c_int, UniqueId(id), rank as c_int) };
        let joined = self.library.check(code, std::ptr::null_mut());
        joined.map_err(|e| e.within("the GPUs of the ranks cannot be connected"))?;
        let Self {
            library,
            stream,
            buffer,
            host,
        } = self;
        Ok(Communicator {
            library,
            comm,
            rank,
            size,
            stream,
            buffer,
            host,
            broken: false,
        })
    }
}

impl Communicator {
    /// Sends each list of `out` to its rank and fills each list of `into`; at most one list for each rank and direction. `look`
    /// is called while the numbers travel; the exchange ends with its error.
    ///
    /// # Errors
    /// NCCL or the GPU has failed; those of `look`. Afterwards nothing can be sent.
    pub fn swap(
        &mut self,
        out: &[(usize, &[f32])],
        into: &mut [(usize, &mut [f32])],
        look: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        self.broken = true;
        self.stream.context().bind_to_thread().map_err(failed)?;
        // The same on all ranks: two ranks cut the list between them in the same way.
        let piece = piece_of(self.size);
        let lengths = out.iter().map(|(_, list)| list.len());
        let longest = lengths
            .chain(into.iter().map(|(_, list)| list.len()))
            .max()
            .unwrap_or(0);
        for first in (0..longest).step_by(piece) {
            let (sends, sent) = self.fill(out, first, piece)?;
            let (receives, received) = self.places(into, first, piece);
            if sends.is_empty() && receives.is_empty() {
                continue;
            }
            self.travel(&sends, sent, &receives, received)?;
            self.wait(look)?;
            let host = self.host.as_slice().map_err(failed)?;
            for (rank, at, length) in receives {
                let bytes = &host[4 * (BUFFER + at)..][..4 * length];
                let (numbers, _) = bytes.as_chunks();
                let lists = into.iter_mut().filter(|(from, _)| *from == rank);
                for (_, list) in lists {
                    let target = &mut list[first..first + length];
                    for (to, from) in target.iter_mut().zip(numbers) {
                        *to = f32::from_ne_bytes(*from);
                    }
                }
            }
        }
        self.broken = false;
        Ok(())
    }

    /// Ends the connection without the other ranks.
    pub fn give_up(mut self) {
        self.broken = true;
    }

    /// Puts the next piece of each list into the page-locked memory. Returns rank, place and length of each, and the end of all.
    fn fill(&mut self, out: &[(usize, &[f32])], first: usize, piece: usize) -> Result<(Vec<BufferPart>, usize)> {
        let own = self.rank;
        let host = self.host.as_mut_slice().map_err(failed)?;
        let (mut parts, mut end): (Vec<BufferPart>, usize) = (Vec::new(), 0);
        let mut last: Option<(*const f32, BufferPart)> = None;
        for (rank, list) in out {
            let part = list.get(first..).unwrap_or_default();
            let part = &part[..part.len().min(piece)];
            if *rank == own || part.is_empty() {
                continue;
            }
            // A list that goes to all ranks is copied once.
            if let Some((memory, (_, at, length))) = last
                && std::ptr::eq(memory, part.as_ptr())
                && length == part.len()
            {
                parts.push((*rank, at, length));
                continue;
            }
            let (target, _) = host[4 * end..][..4 * part.len()].as_chunks_mut();
            for (to, from) in target.iter_mut().zip(part) {
                *to = from.to_ne_bytes();
            }
            let found = (*rank, end, part.len());
            last = Some((part.as_ptr(), found));
            parts.push(found);
            end = next(end + part.len());
        }
        Ok((parts, end))
    }

    /// Rank, place and length of the next piece of each list that is received, and the end of all.
    fn places(&self, into: &[(usize, &mut [f32])], first: usize, piece: usize) -> (Vec<BufferPart>, usize) {
        let (mut parts, mut end) = (Vec::new(), 0);
        for (rank, list) in into.iter().filter(|(rank, _)| *rank != self.rank) {
            let length = list.len().saturating_sub(first).min(piece);
            if length > 0 {
                parts.push((*rank, end, length));
                end = next(end + length);
            }
        }
        (parts, end)
    }

    /// Queues the copies to the GPU and back, and between them the exchange.
    fn travel(&mut self, sends: &[BufferPart], sent: usize, receives: &[BufferPart], received: usize) -> Result<()> {
        let place = |half: usize, at: usize| self.buffer.0 + 4 * (half * BUFFER + at) as u64;
        let queue = self.stream.cu_stream();
        let host = self.host.as_mut_slice().map_err(failed)?;
        let (out, into) = host.split_at_mut(4 * BUFFER);
        if sent > 0 {
            // SAFETY: the first half of the buffer has space for BUFFER numbers; page-locked memory, which changes only after `wait`.
            unsafe { result::memcpy_htod_async(place(0, 0), &out[..4 * sent], queue) }.map_err(failed)?;
        }
        let (library, comm) = (&self.library, self.comm);
        // SAFETY: no argument; each start has its end below.
        library.check(unsafe { (library.group_start)() }, comm)?;
        let mut codes = Vec::new();
        for (rank, at, length) in sends {
            let from = place(0, *at) as *const c_void;
            // SAFETY: the numbers are inside the first half of the buffer, which lives until the stream has finished.
            codes.push(unsafe { (library.send)(from, *length, FLOAT32, *rank as c_int, comm, queue.cast()) });
        }
        for (rank, at, length) in receives {
            let to = place(1, *at) as *mut c_void;
            // SAFETY: the numbers are inside the second half of the buffer, which lives until the stream has finished.
            codes.push(unsafe { (library.recv)(to, *length, FLOAT32, *rank as c_int, comm, queue.cast()) });
        }
        // SAFETY: no argument; it ends the group of above.
        codes.push(unsafe { (library.group_end)() });
        codes.into_iter().try_for_each(|code| library.check(code, comm))?;
        if received > 0 {
            // SAFETY: as above, from the second half; the memory is read only after `wait`.
            unsafe { result::memcpy_dtoh_async(&mut into[..4 * received], place(1, 0), queue) }.map_err(failed)?;
        }
        Ok(())
    }

    /// Waits for what is queued. A rank that is gone never ends an exchange, so this looks at the state in between.
    fn wait(&self, look: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let done = self.stream.record_event(None).map_err(failed)?;
        let mut pause = SHORTEST;
        loop {
            // SAFETY: the event lives.
            match unsafe { result::event::query(done.cu_event()) } {
                Ok(()) => break,
                Err(e) if e.0 == sys::CUresult::CUDA_ERROR_NOT_READY => {}
                Err(e) => return Err(failed(e)),
            }
            let mut state = SUCCESS;
            // SAFETY: the communicator lives; it writes one number.
            let code = unsafe { (self.library.comm_get_async_error)(self.comm, &mut state) };
            self.library.check(code, self.comm)?;
            if state != IN_PROGRESS {
                self.library.check(state, self.comm)?;
            }
            look()?;
            std::thread::sleep(pause);
            pause = (2 * pause).min(LONGEST);
        }
        Ok(())
    }
}

/// Numbers of a piece for one of `size` ranks: `size` pieces fit into the buffer.
fn piece_of(size: usize) -> usize {
    (BUFFER / size / ALIGNED * ALIGNED).max(1)
}

/// The first place from `end` on where a piece may begin.
fn next(end: usize) -> usize {
    end.next_multiple_of(ALIGNED)
}

/// Rank, first number in the buffer, and length.
type BufferPart = (usize, usize, usize);

impl Drop for Communicator {
    fn drop(&mut self) {
        let end = if self.broken {
            self.library.comm_abort
        } else {
            self.library.comm_destroy
        };
        // SAFETY: the communicator is not used afterwards; an exchange that is under way is ended.
        unsafe { end(self.comm) };
        let _ = self.stream.synchronize();
    }
}
