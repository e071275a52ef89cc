//! Reads parts of tensors into the caller's memory, for weights that are read from the disk repeatedly. The parts are
//! dropped from the page cache after the read; otherwise the whole model would fill it.

use super::pieces::FileRun;
use super::{Number, PIECE, TensorInfo, Weights, decode};
use crate::dtype::StoredDtype;
use ft_base::{Error, Result, files};
use half::{bf16, f16};

/// Element types that a file may store directly.
trait StoredNumber: Copy {
    const STORED: StoredDtype;
}

impl StoredNumber for f32 {
    const STORED: StoredDtype = StoredDtype::F32;
}

impl StoredNumber for bf16 {
    const STORED: StoredDtype = StoredDtype::Bf16;
}

impl StoredNumber for f16 {
    const STORED: StoredDtype = StoredDtype::F16;
}

impl StoredNumber for i16 {
    const STORED: StoredDtype = StoredDtype::I16;
}

fn bytes_of<T: StoredNumber>(numbers: &mut [T]) -> &mut [u8] {
    let len = size_of_val(numbers);
    // SAFETY: the same memory, borrowed for the same lifetime; every bit pattern of these types is valid.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), len) }
}

impl Weights {
    /// Turns off the system's readahead: these files are now read in parts.
    pub fn streamed(self) -> Self {
        self.handles.iter().for_each(files::no_readahead);
        self
    }

    /// Data that is read in parts stays in the page cache: other processes read it too. Otherwise it is dropped after
    /// each read.
    pub fn cached(mut self) -> Self {
        self.stays_cached = true;
        self
    }

    /// Reads elements of tensor `name` as f32, from element `first` on, as many as `out` has.
    ///
    /// # Errors
    /// No such tensor, or too few elements in it; not a weight format; a failed read.
    pub fn read_f32_at(&self, name: &str, first: usize, out: &mut [f32]) -> Result<()> {
        self.read_at(name, first, out)
    }

    /// As `read_f32_at`, as bf16 (rounded to nearest, ties to even: the values of `read_bf16`).
    ///
    /// # Errors
    /// As for `read_f32_at`.
    pub fn read_bf16_at(&self, name: &str, first: usize, out: &mut [bf16]) -> Result<()> {
        self.read_at(name, first, out)
    }

    /// As `read_f32_at`, as f16 (rounded to nearest, ties to even; what f16 cannot hold is infinite).
    ///
    /// # Errors
    /// As for `read_f32_at`.
    pub fn read_f16_at(&self, name: &str, first: usize, out: &mut [f16]) -> Result<()> {
        self.read_at(name, first, out)
    }

    /// As `read_f32_at`, for a tensor that is stored as I16.
    ///
    /// # Errors
    /// As for `read_f32_at`; a tensor of another number format.
    pub fn read_i16_at(&self, name: &str, first: usize, out: &mut [i16]) -> Result<()> {
        let info = self.must(name)?;
        if info.dtype != StoredDtype::I16 {
            return Err(Error::shape(format!("tensor `{name}` has another dtype"))
                .at_path(&self.paths[info.file])
                .found(info.dtype)
                .expected("I16"));
        }
        self.inside(name, first, out.len())?;
        self.plain(name, first, out)
    }

    /// Reads stored bytes of a tensor of any number format, starting at byte `first`.
    ///
    /// # Errors
    /// No such tensor, or too few bytes in it; a failed read.
    pub fn read_bytes_at(&self, name: &str, first: usize, out: &mut [u8]) -> Result<()> {
        let info = self.must(name)?;
        if (first + out.len()) as u64 > info.bytes {
            return Err(self.too_short(info, out.len(), first));
        }
        let mut at = first as u64;
        for part in out.chunks_mut(PIECE) {
            self.read_and_forget(name, at, part)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    fn read_at<T: StoredNumber + Number>(&self, name: &str, first: usize, out: &mut [T]) -> Result<()> {
        let info = self.must(name)?;
        self.readable(info)?;
        self.inside(name, first, out.len())?;
        if info.dtype == T::STORED && cfg!(target_endian = "little") {
            return self.plain(name, first, out);
        }
        let size = info.dtype.size();
        let most = (PIECE / 4 / size).min(out.len());
        let mut buffer = vec![0u8; most * size];
        let mut at = first;
        for part in out.chunks_mut(most.max(1)) {
            let raw = &mut buffer[..part.len() * size];
            self.read_and_forget(name, (at * size) as u64, raw)?;
            decode(info.dtype, raw, part);
            at += part.len();
        }
        Ok(())
    }

    fn plain<T: StoredNumber>(&self, name: &str, first: usize, out: &mut [T]) -> Result<()> {
        let size = size_of::<T>();
        let mut at = (first * size) as u64;
        for part in bytes_of(out).chunks_mut(PIECE) {
            self.read_and_forget(name, at, part)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    fn read_and_forget(&self, name: &str, at: u64, out: &mut [u8]) -> Result<()> {
        let info = self.must(name)?;
        self.read_exact(info, at, out)?;
        if self.stays_cached {
            return Ok(());
        }
        if let Some(runs) = self.runs(info, at, out.len()) {
            let forget = |run: &FileRun| files::forget(&self.handles[run.file], run.offset, run.bytes as u64);
            runs.iter().for_each(forget);
            return Ok(());
        }
        let stored = self.stored_part(info, at, out.len());
        let (handle, size) = (&self.handles[info.file], info.dtype.size());
        match info.view {
            None => files::forget(handle, info.offset + at, stored as u64),
            // The bytes between its elements belong to other parts, which are read next.
            Some(view) if view.last && at + stored as u64 == info.bytes => {
                files::forget(handle, info.offset, (view.span() * size) as u64);
            }
            Some(_) => {}
        }
        Ok(())
    }

    fn inside(&self, name: &str, first: usize, count: usize) -> Result<()> {
        let info = self.must(name)?;
        match first.checked_add(count) {
            Some(end) if end <= info.count() => Ok(()),
            _ => Err(self.too_short(info, count, first)),
        }
    }

    fn too_short(&self, info: &TensorInfo, count: usize, first: usize) -> Error {
        Error::argument(format!("tensor `{}` has fewer values than requested", info.name))
            .at_path(&self.paths[info.file])
            .found(info.count())
            .expected(format!("{count} from index {first} on"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::writer::{TensorPlan, Values, write_file};
    use ft_base::rng::{Rng, Stream};

    #[test]
    fn parts_are_the_parts_of_the_whole_in_every_format() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        let rng = Rng::new(1, Stream::Init, &[]);
        // Longer than a piece, and not a multiple of a power of two.
        let n = (PIECE / 4) + 12_347;
        let values: Vec<f32> = (0..n as u64).map(|i| rng.normal(i)).collect();
        let formats = [StoredDtype::F32, StoredDtype::F16, StoredDtype::Bf16, StoredDtype::F64];
        let mut plans: Vec<TensorPlan> = formats
            .iter()
            .map(|&dtype| TensorPlan {
                name: dtype.name().into(),
                dtype,
                shape: vec![n],
            })
            .collect();
        plans.push(TensorPlan {
            name: "low".into(),
            dtype: StoredDtype::I16,
            shape: vec![3],
        });
        write_file(&path, &plans, &[], |plan, sink| match plan.name.as_str() {
            "low" => sink(Values::Raw(&[1, 0, 2, 0, 255, 255])),
            _ => sink(Values::F32(&values)),
        })
        .unwrap();
        let w = Weights::open_file(&path).unwrap().streamed();
        for dtype in formats {
            let (wide, narrow) = (w.read_f32(dtype.name()).unwrap(), w.read_bf16(dtype.name()).unwrap());
            for (first, count) in [(0, n), (1, 7), (n - 1, 1), (12_345, PIECE / 4), (n, 0)] {
                let mut got = vec![f32::NAN; count];
                w.read_f32_at(dtype.name(), first, &mut got).unwrap();
                assert_eq!(got, wide[first..first + count], "{dtype} {first}");
                let mut got = vec![bf16::NAN; count];
                w.read_bf16_at(dtype.name(), first, &mut got).unwrap();
                assert_eq!(got, narrow[first..first + count], "{dtype} {first}");
            }
            assert!(w.read_f32_at(dtype.name(), n - 1, &mut [0.0; 2]).is_err());
            assert!(w.read_i16_at(dtype.name(), 0, &mut [0; 1]).is_err());
        }
        let mut low = [0; 2];
        w.read_i16_at("low", 1, &mut low).unwrap();
        assert_eq!(low, [2, -1]);
        assert!(w.read_f32_at("low", 0, &mut [0.0; 1]).is_err());
        assert!(w.read_f32_at("none", 0, &mut [0.0; 1]).is_err());
    }

    /// Pages of a file that are in the page cache, and all of its pages.
    #[cfg(target_os = "linux")]
    fn cached_pages(file: &std::fs::File) -> (usize, usize) {
        use std::os::fd::AsRawFd;
        let bytes = file.metadata().unwrap().len() as usize;
        let mut pages = vec![0u8; bytes.div_ceil(4096)];
        // SAFETY: the map is as long as the file, and `pages` has a byte for each of its pages. Nothing reads the map.
        unsafe {
            let map = libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            );
            assert_ne!(map, libc::MAP_FAILED);
            assert_eq!(libc::mincore(map, bytes, pages.as_mut_ptr()), 0);
            libc::munmap(map, bytes);
        }
        (pages.iter().filter(|page| **page & 1 == 1).count(), pages.len())
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn cached_weights_stay_in_the_page_cache() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("w.safetensors");
        let values = vec![1.0; 1 << 20];
        let plan = TensorPlan {
            name: "w".into(),
            dtype: StoredDtype::F32,
            shape: vec![values.len()],
        };
        write_file(&path, &[plan], &[], |_, sink| sink(Values::F32(&values))).unwrap();
        let file = files::open(&path).unwrap();
        files::forget(&file, 0, 0);
        let (left, all) = cached_pages(&file);
        if left == all {
            eprintln!("skipped: the files of this folder are always in memory");
            return;
        }
        let mut read = vec![0.0; values.len()];
        let weights = || Weights::open_file(&path).unwrap();
        weights().streamed().read_f32_at("w", 0, &mut read).unwrap();
        assert!(cached_pages(&file).0 < all / 2, "{:?}", cached_pages(&file));
        weights().cached().read_f32_at("w", 0, &mut read).unwrap();
        assert_eq!(cached_pages(&file), (all, all));
    }
}
