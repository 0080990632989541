//! Cases of convolutions, pooling, upscaling, ranges and the cross-entropy loss.

use quadriga_graph::{DType, Interpolation, Op, Pooling, Window};

use super::CaseList;
use super::builder::InputLayout;
use super::fill::{Fill, UNIT};
use crate::Tolerance;

/// Windows: one element, odd and even sizes, wide, tall, with strides, padding and dilation.
fn windows() -> Vec<Window> {
    vec![
        Window::new([1, 1]),
        Window::new([3, 3]).padding([1, 1]),
        Window::new([2, 2]).stride([2, 2]),
        Window::new([1, 5]).padding([0, 2]).stride([1, 3]),
        Window::new([4, 1]).padding([3, 0]).stride([3, 1]),
        Window::new([3, 2]).padding([2, 1]).stride([2, 3]),
        Window::new([3, 3]).padding([2, 3]).dilation([2, 3]),
    ]
}

/// Images around vector widths; an empty batch.
const IMAGES: [[usize; 4]; 7] =
    [[1, 1, 7, 9], [2, 3, 8, 8], [1, 5, 13, 17], [3, 1, 7, 33], [1, 16, 9, 10], [2, 2, 31, 65], [0, 2, 9, 9]];

pub(super) fn list(list: &mut CaseList) {
    patches(list);
    convolutions(list);
    pools(list);
    upscales(list);
    ranges(list);
    losses(list);
}

fn text(window: Window) -> String {
    let Window { kernel, stride, padding, dilation } = window;
    format!("{kernel:?} stride {stride:?} padding {padding:?} dilation {dilation:?}")
}

fn patches(list: &mut CaseList) {
    for from in [DType::F32, DType::F16] {
        for to in [DType::F32, DType::F16] {
            for dims in IMAGES {
                for window in windows() {
                    let layout = InputLayout::any(list.len());
                    let details = format!("{from} {dims:?}{layout} to {to} {}", text(window));
                    list.push("im2col", details, Tolerance::written(to), move |s| {
                        s.out(s.strided_input(from, dims, layout, UNIT).im2col(window, to));
                    });
                }
            }
        }
    }
    for width in [5, 16, 33] {
        let window = Window::one_dimensional(3).stride([1, 2]).padding([0, 1]);
        list.push("im2col", format!("[2, 3, {width}] in one dimension"), Tolerance::Exact, move |s| {
            let x = s.input(DType::F32, [1, 2, 3, width], UNIT).reshape([2, 3, width]);
            s.out(x.im2col_1d(window, DType::F32));
        });
    }
}

fn convolutions(list: &mut CaseList) {
    for kernel_type in [DType::F32, DType::F16] {
        for dims in IMAGES {
            let [_, channels, height, width] = dims;
            for window in windows() {
                let [kh, kw] = window.kernel;
                let layout = InputLayout::any(list.len());
                let tail = format!("{kernel_type} {dims:?}{layout} {}", text(window));
                for outputs in [1, 6] {
                    let details = format!("{outputs} channels {tail}");
                    list.push("conv_2d", details, Tolerance::DEFAULT, move |s| {
                        let kernel = s.strided_input(
                            kernel_type,
                            [outputs, channels, kh, kw],
                            InputLayout::Plain,
                            UNIT,
                        );
                        let kernel = kernel.reshape([outputs, channels, kh, kw]);
                        s.out(s.strided_input(DType::F32, dims, layout, UNIT).conv_2d(kernel, window));
                    });
                }
                list.push("conv_2d_dw", tail.clone(), Tolerance::DEFAULT, move |s| {
                    let kernel =
                        s.strided_input(kernel_type, [channels, 1, kh, kw], InputLayout::any(kh), UNIT);
                    s.out(s.strided_input(DType::F32, dims, layout, UNIT).conv_2d_depthwise(kernel, window));
                });
                if height * width > 400 {
                    continue;
                }
                list.push("conv_transpose_2d", tail, Tolerance::DEFAULT, move |s| {
                    let kernel =
                        s.strided_input(kernel_type, [channels, 3, kh, kw], InputLayout::any(kw), UNIT);
                    s.out(
                        s.strided_input(DType::F32, dims, layout, UNIT)
                            .conv_transpose_2d(kernel, window.stride),
                    );
                });
            }
        }
    }
    for (batch, width) in [(1, 7), (2, 33)] {
        for stride in [1, 2, 5] {
            let details = format!("[{batch}, 4, {width}] stride {stride} in one dimension");
            list.push("conv_2d", details.clone(), Tolerance::DEFAULT, move |s| {
                let kernel = s.input(DType::F32, [1, 6, 4, 3], UNIT).reshape([6, 4, 3]);
                let x = s.input(DType::F32, [1, batch, 4, width], UNIT).reshape([batch, 4, width]);
                let window = Window::one_dimensional(3).stride([1, stride]).padding([0, 1]);
                s.out(x.conv_1d(kernel, window));
            });
            list.push("conv_transpose_2d", details, Tolerance::DEFAULT, move |s| {
                let kernel = s.input(DType::F32, [1, 4, 6, 3], UNIT).reshape([4, 6, 3]);
                let x = s.input(DType::F32, [1, batch, 4, width], UNIT).reshape([batch, 4, width]);
                s.out(x.conv_transpose_1d(kernel, stride));
            });
        }
    }
}

fn pools(list: &mut CaseList) {
    for pooling in [Pooling::Max, Pooling::Average, Pooling::AverageInside] {
        for dtype in [DType::F32, DType::F16] {
            for dims in IMAGES {
                for window in windows().into_iter().filter(|window| window.dilation == [1; 2]) {
                    let layout = InputLayout::any(list.len());
                    let op = Op::Pool { pooling, window };
                    let details = format!("{pooling:?} {dtype} {dims:?}{layout} {}", text(window));
                    let tolerance =
                        if pooling == Pooling::Max { Tolerance::Exact } else { Tolerance::DEFAULT };
                    list.push(op.name(), details, tolerance, move |s| {
                        let x = s.strided_input(dtype, dims, layout, Fill::Range(-3.0, -1.0));
                        s.out(s.graph().apply(op.clone(), &[x]));
                    });
                }
            }
            let details = format!("{pooling:?} {dtype} [5, 33] in one dimension");
            let window = Window::one_dimensional(4).stride([1, 3]).padding([0, 2]);
            let name = Op::Pool { pooling, window }.name();
            list.push(name, details, Tolerance::DEFAULT, move |s| {
                s.out(s.input(dtype, [1, 1, 5, 33], UNIT).pool_1d(pooling, window));
            });
        }
    }
}

fn upscales(list: &mut CaseList) {
    for interpolation in [Interpolation::Nearest, Interpolation::Bilinear] {
        for (dims, to) in [
            ([1, 1, 1, 1], [1, 1, 1, 1]),
            ([1, 1, 4, 4], [1, 1, 8, 8]),
            ([2, 3, 5, 7], [2, 3, 10, 21]),
            ([1, 2, 3, 5], [1, 2, 8, 9]),
            ([2, 2, 3, 3], [4, 6, 5, 7]),
            ([1, 1, 9, 33], [1, 1, 4, 10]),
            ([1, 3, 16, 17], [1, 3, 33, 64]),
            ([1, 2, 3, 4], [0, 2, 3, 4]),
        ] {
            let layout = InputLayout::any(list.len());
            let tolerance =
                if interpolation == Interpolation::Nearest { Tolerance::Exact } else { Tolerance::DEFAULT };
            list.push(
                "upscale",
                format!("{interpolation:?} {dims:?}{layout} to {to:?}"),
                tolerance,
                move |s| {
                    s.out(s.strided_input(DType::F32, dims, layout, UNIT).upscale(to, interpolation));
                },
            );
        }
    }
}

fn ranges(list: &mut CaseList) {
    for (start, step, count) in
        [(0.0, 1.0, 0), (0.0, 1.0, 1), (0.0, 1.0, 33), (-2.5, 0.125, 1000), (7.0, -3.0, 17), (1.0, 0.1, 4097)]
    {
        list.push("arange", format!("{count} from {start} by {step}"), Tolerance::DEFAULT, move |s| {
            s.out(s.graph().apply(Op::Arange { start, step, count }, &[]));
        });
    }
}

fn losses(list: &mut CaseList) {
    for dims in [[1, 1, 1, 1], [1, 1, 1, 7], [1, 1, 5, 32], [1, 2, 3, 33], [2, 3, 4, 100], [1, 1, 3, 4097]] {
        for fill in [UNIT, Fill::Range(-50.0, 50.0)] {
            let layout = InputLayout::any(list.len());
            list.push(
                "cross_entropy_loss",
                format!("{dims:?}{layout} {fill:?}"),
                Tolerance::DEFAULT,
                move |s| {
                    let labels = s.strided_input(DType::F32, dims, layout, Fill::Range(0.0, 1.0));
                    s.out(s.strided_input(DType::F32, dims, layout, fill).cross_entropy_loss(labels));
                },
            );
        }
    }
}
