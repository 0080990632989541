//! Compiled kernels inside the binary, as scripts/cuda-images makes them: machine code for common generations, and PTX
//! that the driver compiles for all others.

use super::sources::KernelFile;

/// What an image was compiled for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Target {
    /// Machine code for devices of this compute capability, and for later ones of the same generation.
    Machine(&'static str),
    /// Code that the driver compiles for any later device.
    Ptx(&'static str),
}

/// The architecture of the PTX.
const PTX: &str = "compute_90";

impl Target {
    /// What a device of this compute capability runs.
    pub(super) fn of((major, minor): (i32, i32)) -> Target {
        match (major, minor) {
            (7, 5..) => Target::Machine("sm_75"),
            (8, _) => Target::Machine("sm_80"),
            (9, 0) => Target::Machine("sm_90a"),
            (10, _) => Target::Machine("sm_100"),
            (12, _) => Target::Machine("sm_120"),
            _ => Target::Ptx(PTX),
        }
    }

    /// The PTX, for a device that runs it.
    pub(super) fn ptx_for((major, _): (i32, i32)) -> Option<Target> {
        (major >= 9).then_some(Target::Ptx(PTX))
    }

    pub(super) fn architecture(self) -> &'static str {
        match self {
            Target::Machine(name) | Target::Ptx(name) => name,
        }
    }
}

/// What is recorded of each image: target, file, hash of its source, bytes.
const MANIFEST: &str = include_str!("../../images/manifest.txt");

macro_rules! images {
    ($($target:literal: $($file:literal)*;)*) => {
        &[$($(($target, $file, include_bytes!(concat!("../../images/", $target, "/", $file, ".zz")).as_slice()),)*)*]
    };
}

/// Target, file without ".cu", and zlib stream of every image. Files whose kernels need a newer generation than the
/// target are left out.
const IMAGES: &[(&str, &str, &[u8])] = images! {
    "sm_75": "elementwise" "norm" "rope" "rows" "reduce" "matmul" "pack" "attention" "gemm" "conv" "experts" "recurrent" "experts_gemv"
              "experts_stream" "sparse";
    "sm_80": "elementwise" "norm" "rope" "rows" "reduce" "matmul" "pack" "attention" "gemm" "conv" "experts" "recurrent" "experts_gemv"
              "experts_stream" "sparse" "attention_mma" "attention_decode" "attention_grouped" "attention_paged" "experts_gemm" "delta_chunks" "gemm_heads";
    "sm_90a": "elementwise" "norm" "rope" "rows" "reduce" "matmul" "pack" "attention" "gemm" "conv" "experts" "recurrent" "experts_gemv"
              "experts_stream" "sparse" "attention_mma" "attention_decode" "attention_grouped" "attention_paged" "experts_gemm" "delta_chunks" "gemm_heads" "gemv_streamed" "experts_decode"
              "gemm_wgmma" "gemm_mixed";
    "sm_100": "elementwise" "norm" "rope" "rows" "reduce" "matmul" "pack" "attention" "gemm" "conv" "experts" "recurrent" "experts_gemv"
              "experts_stream" "sparse" "attention_mma" "attention_decode" "attention_grouped" "attention_paged" "experts_gemm" "delta_chunks" "gemm_heads" "gemv_streamed" "experts_decode";
    "sm_120": "elementwise" "norm" "rope" "rows" "reduce" "matmul" "pack" "attention" "gemm" "conv" "experts" "recurrent" "experts_gemv"
              "experts_stream" "sparse" "attention_mma" "attention_decode" "attention_grouped" "attention_paged" "experts_gemm" "delta_chunks" "gemm_heads" "gemv_streamed" "experts_decode";
    "compute_90": "elementwise" "norm" "rope" "rows" "reduce" "matmul" "pack" "attention" "gemm" "conv" "experts" "recurrent" "experts_gemv"
              "experts_stream" "sparse" "attention_mma" "attention_decode" "attention_grouped" "attention_paged" "experts_gemm" "delta_chunks" "gemm_heads" "gemv_streamed" "experts_decode";
};

/// Whether there is an image of a file that was made from the sources that this binary has.
pub(super) fn has_current(file: KernelFile, target: Target) -> bool {
    Record::of(file, target).is_some_and(|record| record.is_current(file, target))
}

/// The image of a file, if there is one and it was made from the sources that this binary has.
pub(super) fn image(file: KernelFile, target: Target) -> Option<Vec<u8>> {
    let record = Record::of(file, target)?;
    if !record.is_current(file, target) {
        return None;
    }
    let stem = file.name().trim_end_matches(".cu");
    let (_, _, packed) = IMAGES.iter().find(|(t, f, _)| *t == target.architecture() && *f == stem)?;
    let image = miniz_oxide::inflate::decompress_to_vec_zlib_with_limit(packed, record.bytes).ok()?;
    (image.len() == record.bytes).then_some(image)
}

/// A line of the manifest.
struct Record {
    compiler: &'static str,
    hash: &'static str,
    bytes: usize,
}

impl Record {
    fn is_current(&self, file: KernelFile, target: Target) -> bool {
        self.hash == file.hash(target.architecture(), self.compiler)
    }

    fn of(file: KernelFile, target: Target) -> Option<Record> {
        MANIFEST.lines().find_map(|line| {
            let mut words = line.split_whitespace();
            let ours = words.next()? == target.architecture() && words.next()? == file.name();
            let (compiler, hash, bytes) = (words.next()?, words.next()?, words.next()?);
            ours.then(|| bytes.parse().ok().map(|bytes| Record { compiler, hash, bytes })).flatten()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::is_complete_elf;

    const TARGETS: [(&str, Target); 6] = [
        ("sm_75", Target::Machine("sm_75")),
        ("sm_80", Target::Machine("sm_80")),
        ("sm_90a", Target::Machine("sm_90a")),
        ("sm_100", Target::Machine("sm_100")),
        ("sm_120", Target::Machine("sm_120")),
        (PTX, Target::Ptx(PTX)),
    ];

    #[test]
    fn the_images_are_of_these_sources() {
        for (name, stem, _) in IMAGES {
            let (_, target) = TARGETS.iter().find(|(known, _)| known == name).unwrap();
            let file = KernelFile::ALL.into_iter().find(|f| f.name() == format!("{stem}.cu")).unwrap();
            let image = image(file, *target);
            let image = image.unwrap_or_else(|| panic!("{stem}.cu has changed: run scripts/cuda-images"));
            match target {
                Target::Machine(_) => assert!(is_complete_elf(&image), "{stem} {name}"),
                // What the driver of CUDA 12.0 takes.
                Target::Ptx(_) => assert!(image.windows(12).any(|line| line == b".version 8.0"), "{stem}"),
            }
        }
        assert_eq!(MANIFEST.lines().filter(|line| !line.starts_with('#')).count(), IMAGES.len());
    }

    #[test]
    fn every_device_from_7_5_on_has_a_target() {
        let of = |major, minor| Target::of((major, minor)).architecture();
        assert_eq!(of(7, 5), "sm_75");
        assert_eq!([of(8, 0), of(8, 6), of(8, 9)], ["sm_80"; 3]);
        assert_eq!(of(9, 0), "sm_90a");
        assert_eq!([of(10, 0), of(10, 3)], ["sm_100"; 2]);
        assert_eq!([of(12, 0), of(12, 1)], ["sm_120"; 2]);
        assert_eq!([of(11, 0), of(13, 0)], [PTX; 2]);
        assert_eq!(Target::ptx_for((8, 9)), None);
    }

    #[test]
    fn every_launched_kernel_is_in_the_images_for_hopper() {
        let target = Target::of((9, 0));
        let images: Vec<u8> = KernelFile::ALL.iter().filter_map(|f| image(*f, target)).flatten().collect();
        let launched = crate::kernels::tests::launched();
        assert!(launched.len() > 50, "{launched:?}");
        for name in launched {
            // A symbol's name in the image ends with a zero.
            let symbol = format!("\0{name}\0");
            let found = images.windows(symbol.len()).any(|bytes| bytes == symbol.as_bytes());
            assert!(found, "no kernel is called {name}");
        }
    }
}
