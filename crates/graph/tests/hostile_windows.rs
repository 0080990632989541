//! Convolutions, pooling, upscaling and ranges with hostile numbers: errors of the builder or valid graphs, no panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use quadriga_graph::{DType, Graph, GraphBuilder, Interpolation, Op, Pooling, Shape, Value, Window};

/// A small generator of numbers (xorshift), so that the graph crate needs no other.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 as usize
    }

    /// Mostly small, sometimes at a limit.
    fn size(&mut self) -> usize {
        let limits = [0, usize::MAX, usize::MAX / 2, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 62, 65_536];
        match self.next() % 4 {
            0 => limits[self.next() % limits.len()],
            1 => self.next() % 1000,
            _ => self.next() % 6,
        }
    }

    fn sizes<const N: usize>(&mut self) -> [usize; N] {
        std::array::from_fn(|_| self.size())
    }

    fn float(&mut self) -> f32 {
        [0.0, 1.0, -1.0, f32::NAN, f32::INFINITY, f32::MIN_POSITIVE, f32::MAX, 0.1][self.next() % 8]
    }
}

fn build(numbers: &mut Numbers) -> Result<Graph, quadriga_graph::BuildError> {
    let g = GraphBuilder::new();
    let dtype = [DType::F32, DType::F16, DType::I32, DType::Q4_0][numbers.next() % 4];
    let leaf = |numbers: &mut Numbers, name: &str| {
        let all = numbers.sizes::<4>();
        let rank = numbers.next() % 5;
        g.input(
            name,
            if numbers.next().is_multiple_of(4) { dtype } else { DType::F32 },
            Shape::new(&all[4 - rank..]).unwrap(),
        )
    };
    let x = leaf(numbers, "x");
    let x = if numbers.next().is_multiple_of(3) { x.transpose() } else { x };
    let other = leaf(numbers, "other");
    let mut window = Window {
        kernel: numbers.sizes(),
        stride: numbers.sizes(),
        padding: numbers.sizes(),
        dilation: numbers.sizes(),
    };
    if numbers.next().is_multiple_of(2) {
        let [_, _, kh, kw] = other.shape().dims4();
        window = Window::new([kh, kw]).stride(window.stride).padding(window.padding);
    }
    let pooling = [Pooling::Max, Pooling::Average, Pooling::AverageInside][numbers.next() % 3];
    let interpolation = [Interpolation::Nearest, Interpolation::Bilinear][numbers.next() % 2];
    let to = [DType::F32, DType::F16, DType::Q8_0, DType::I32][numbers.next() % 4];
    let made: Value<'_> = match numbers.next() % 13 {
        0 => x.im2col(window, to),
        1 => x.im2col_1d(window, to),
        2 => x.conv_2d(other, window),
        3 => x.conv_1d(other, window),
        4 => x.conv_2d_depthwise(other, window),
        5 => x.conv_transpose_2d(other, window.stride),
        6 => x.conv_transpose_1d(other, window.stride[0]),
        7 => x.pool_2d(pooling, window),
        8 => x.pool_1d(pooling, window),
        9 => x.upscale(numbers.sizes::<4>(), interpolation),
        10 => g.arange(numbers.float(), numbers.float(), numbers.float()),
        11 => {
            let (start, step, count) = (numbers.float(), numbers.float(), numbers.size());
            g.apply(Op::Arange { start, step, count }, &[])
        }
        _ => x.cross_entropy_loss(other),
    };
    g.output("y", made);
    g.finish()
}

#[test]
fn hostile_windows_are_errors_and_never_panic() {
    let (mut built, mut refused) = (0, 0);
    for seed in 1..60_000u64 {
        let mut numbers = Numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| build(&mut numbers)));
        match result.unwrap_or_else(|_| panic!("seed {seed} panicked")) {
            Ok(graph) => {
                built += 1;
                // Sizes are those of real memory.
                for tensor in graph.tensors() {
                    assert!(tensor.shape().checked_elements().is_some(), "seed {seed}");
                }
            }
            Err(error) => {
                refused += 1;
                assert!(!error.to_string().is_empty());
            }
        }
    }
    println!("{built} graphs, {refused} errors");
    assert!(built > 1000 && refused > 1000, "{built} graphs, {refused} errors");
}

#[test]
fn errors_name_the_numbers() {
    let error = |build: &dyn for<'g> Fn(Value<'g>) -> Value<'g>| {
        let g = GraphBuilder::new();
        build(g.input("x", DType::F32, [1, 2, 5, 5]));
        g.finish().unwrap_err().to_string()
    };
    let two = Window::new([2, 2]);
    assert!(error(&|x| x.pool_2d(Pooling::Max, two.padding([2, 0]))).contains("padding [2, 0]"));
    assert!(error(&|x| x.pool_2d(Pooling::Max, Window::new([6, 1]))).contains("does not fit"));
    assert!(error(&|x| x.im2col(two.stride([0, 1]), DType::F32)).contains("at least 1"));
    assert!(error(&|x| x.im2col(two, DType::Q8_0)).contains("F32 or F16"));
    assert!(error(&|x| x.conv_2d(x, two)).contains("does not match"));
    assert!(error(&|x| x.conv_transpose_2d(x, [1, 1])).contains("does not match 2 channels"));
    assert!(error(&|x| x.cross_entropy_loss(x.slice(0, 0, 0))).contains("differ"));
}

#[test]
fn parameters_change_the_fingerprint() {
    let graph = |window: Window, pooling| {
        let g = GraphBuilder::new();
        g.output("y", g.input("x", DType::F32, [1, 1, 8, 8]).pool_2d(pooling, window));
        g.finish().unwrap().fingerprint()
    };
    let window = Window::new([3, 3]);
    // All have results of the same shape.
    let all = [
        graph(window.padding([1, 1]), Pooling::Max),
        graph(Window::new([1, 1]), Pooling::Max),
        graph(window.padding([1, 1]), Pooling::Average),
        graph(window.padding([1, 1]), Pooling::AverageInside),
    ];
    for (i, a) in all.iter().enumerate() {
        assert!(all.iter().skip(i + 1).all(|b| a != b));
    }
}
