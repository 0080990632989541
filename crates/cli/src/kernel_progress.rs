//! A progress bar while GPU kernels are compiled, which happens once, and only for devices whose machine code is not in
//! the binary.

use indicatif::{ProgressBar, ProgressStyle};

/// Shows a bar, where standard error is a terminal, whenever kernels are compiled from now on.
pub(crate) fn install() {
    let bar = ProgressBar::hidden();
    let style = ProgressStyle::with_template("compiling kernels for this GPU, once [{wide_bar}] {pos}/{len}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    quadriga_cuda::observe_compilation(move |compilation| {
        if bar.is_hidden() && compilation.done < compilation.total {
            bar.set_draw_target(indicatif::ProgressDrawTarget::stderr());
        }
        bar.set_length(compilation.total as u64);
        bar.set_position(compilation.done as u64);
        if compilation.done == compilation.total {
            bar.finish_and_clear();
            bar.reset();
            bar.set_draw_target(indicatif::ProgressDrawTarget::hidden());
        }
    });
}
