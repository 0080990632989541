//! Which layers have a sliding attention window.

use quadriga_graph::Rope;

use super::Hyperparameters;
use super::keys::Keys;
use crate::Result;

/// The layers with a window where the file does not say which.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WindowPattern {
    /// All of them.
    All,
    /// All but the last of every so many.
    Period(usize),
    /// All but the first of every so many.
    PeriodGlobalFirst(usize),
}

impl WindowPattern {
    /// Whether a layer has a window. A period of 1 means none.
    fn has_window(self, layer: usize) -> bool {
        match self {
            WindowPattern::All => true,
            WindowPattern::Period(period) => !(layer + 1).is_multiple_of(period),
            WindowPattern::PeriodGlobalFirst(period) => !layer.is_multiple_of(period),
        }
    }

    fn with_period(self, period: usize) -> WindowPattern {
        match self {
            WindowPattern::PeriodGlobalFirst(_) => WindowPattern::PeriodGlobalFirst(period),
            _ => WindowPattern::Period(period),
        }
    }
}

/// The positions that a query attends to in layers with a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowSpan {
    /// The size of the window; at least 1.
    size: usize,
    /// Whether positions are divided into chunks of this size, and only those of the query's own chunk are seen.
    chunked: bool,
}

impl WindowSpan {
    /// The first position that the query at a position attends to. The last is its own.
    pub fn first(self, position: usize) -> usize {
        match self.chunked {
            true => position - position % self.size.max(1),
            false => (position + 1).saturating_sub(self.size),
        }
    }
}

impl Hyperparameters {
    /// The positions that a query attends to in layers with a window; `None` if no layer has one.
    pub fn window_span(&self) -> Option<WindowSpan> {
        self.window().map(|size| WindowSpan { size, chunked: self.chunked_windows })
    }

    /// The rotary embeddings of the layers with a window, which may differ from the others.
    pub(crate) fn window_ropes(&mut self) -> impl Iterator<Item = &mut Rope> {
        self.layers.iter_mut().filter(|layer| layer.window.is_some()).filter_map(|layer| layer.rope.as_mut())
    }

    /// An error if heads of layers with a window have a shape of their own, which is not supported.
    pub(super) fn check_window_heads(&self, keys: &Keys<'_>) -> Result<()> {
        let Some(layer) = self.layers.iter().find(|layer| layer.window.is_some()) else { return Ok(()) };
        let rotated = layer.rope.map_or(layer.key_length, |rope| rope.dims);
        for (key, length, like) in [
            ("attention.key_length_swa", layer.key_length, "attention.key_length"),
            ("attention.value_length_swa", layer.value_length, "attention.value_length"),
            ("rope.dimension_count_swa", rotated, "rope.dimension_count"),
        ] {
            if let Some(own) = keys.find_count(key)? {
                let wanted = format!("absent or {length}, as {like}: heads of windows have the same shape");
                keys.check(key, own, own == length, &wanted)?;
            }
        }
        Ok(())
    }

    /// As [`Hyperparameters::read_windows`], for architectures that are not the same without windows: 0 is an error.
    pub(crate) fn require_windows(
        &mut self,
        keys: &Keys<'_>,
        default: Option<usize>,
        pattern: WindowPattern,
    ) -> Result<()> {
        keys.find_count("attention.sliding_window")?;
        self.read_windows(keys, default, pattern)
    }

    /// Reads the size of the window (0: no windows; `default` if the file has none) and gives it to the layers that the
    /// file's pattern names, or else the architecture's. These layers may have a base frequency of their own.
    pub(crate) fn read_windows(
        &mut self,
        keys: &Keys<'_>,
        default: Option<usize>,
        pattern: WindowPattern,
    ) -> Result<()> {
        self.give_windows(keys, default, pattern)?;
        if let Some(base) = keys.find_factor("rope.freq_base_swa")? {
            self.window_ropes().for_each(|rope| rope.base = base);
        }
        Ok(())
    }

    fn give_windows(
        &mut self,
        keys: &Keys<'_>,
        default: Option<usize>,
        pattern: WindowPattern,
    ) -> Result<()> {
        let size = keys.find_count_or_zero("attention.sliding_window")?.or(default).filter(|size| *size > 0);
        let key = "attention.sliding_window_pattern";
        if keys.is_array(key) {
            let flags = keys.find_flags(key, self.blocks)?.unwrap_or_default();
            for (layer, flag) in self.layers.iter_mut().zip(flags) {
                layer.window = size.filter(|_| flag);
            }
            return Ok(());
        }
        let period = keys.find_count(key)?;
        let pattern = period.map_or(pattern, |period| pattern.with_period(period));
        for (index, layer) in self.layers.iter_mut().enumerate() {
            layer.window = size.filter(|_| pattern.has_window(index));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_begin_at_multiples_of_their_size_and_windows_slide() {
        let first = |chunked: bool| {
            let span = WindowSpan { size: 4, chunked };
            [0, 3, 4, 7, 8, 10].map(|position| span.first(position))
        };
        assert_eq!(first(true), [0, 0, 4, 4, 8, 8]);
        assert_eq!(first(false), [0, 0, 1, 4, 5, 7]);
    }

    #[test]
    fn patterns_follow_their_definition() {
        let layers =
            |pattern: WindowPattern| (0..6).map(|layer| pattern.has_window(layer)).collect::<Vec<_>>();
        assert_eq!(layers(WindowPattern::Period(3)), [true, true, false, true, true, false]);
        assert_eq!(layers(WindowPattern::PeriodGlobalFirst(3)), [false, true, true, false, true, true]);
        assert_eq!(layers(WindowPattern::Period(1)), [false; 6]);
        assert_eq!(layers(WindowPattern::PeriodGlobalFirst(1)), [false; 6]);
        assert_eq!(layers(WindowPattern::All), [true; 6]);
    }
}
