//! The formats whose elements are entries of a code book: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S.
//!
//! For a vector of values `x` with weights `w`, an entry `g` at step `s` has the error `Σ w (x − s g)²`, which is
//! `Σ w x² − 2 s a + s² b` with `a = Σ w x g` and `b = Σ w g²`. These do not depend on the step: they are computed once
//! for all entries, eight at a time, and every step that is tried costs one pass over them. So the whole book is searched.

use quadriga_graph::blocks::{FormatError, GridBlock, as_blocks_mut};

use super::grid_book::{Book, GridFormat};
use super::group_scales::{as_half, half_bytes};
use super::kernel::{Kernel, Rows};
use super::simd::{Lanes, Simd};

/// Steps that are tried for a group, as parts of the one that maps the largest magnitude to the largest level.
const PARTS: [f32; 7] = [0.55, 0.65, 0.74, 0.83, 0.92, 1.02, 1.15];

/// `a` and `b` of all entries, for all vectors of a block: `[vector][variant][octet]`.
struct Products {
    a: Vec<[f32; 8]>,
    b: Vec<[f32; 8]>,
}

/// The entries of a group's vectors at one step.
#[derive(Clone, Copy)]
struct Choice {
    /// By how much the error is lower than without any entry.
    gain: f32,
    /// Σ a and Σ b of the chosen entries.
    a: f32,
    b: f32,
    variant: usize,
    entries: [u16; 8],
}

impl Book {
    /// Computes `a` and `b` of one vector for all entries.
    #[inline(always)]
    fn multiply<S: Simd>(&self, simd: S, x: &[f32], w: &[f32], a: &mut [[f32; 8]], b: &mut [[f32; 8]]) {
        let entries = self.levels.chunks_exact(self.length);
        for ((levels, a), b) in entries.zip(a).zip(b) {
            let (mut product, mut square) = (simd.splat(0.0), simd.splat(0.0));
            for ((level, x), w) in levels.iter().zip(x).zip(w) {
                let level = simd.load(level);
                let weighted = level * simd.splat(*w);
                product = product + weighted * simd.splat(*x);
                square = square + weighted * level;
            }
            (*a, *b) = (product.store(), square.store());
        }
    }

    /// The best entry of one vector at a step: its index, `a` and `b`.
    #[inline(always)]
    fn nearest<S: Simd>(&self, simd: S, a: &[[f32; 8]], b: &[[f32; 8]], step: f32) -> (u16, f32, f32) {
        let half = simd.splat(step / 2.0);
        let (mut most, mut place) = (simd.splat(f32::MIN), simd.splat(0.0));
        for (octet, (a, b)) in a.iter().zip(b).enumerate() {
            let gain = simd.load(a) - half * simd.load(b);
            let better = most.less(gain);
            most = S::F::select(better, gain, most);
            place = S::F::select(better, simd.splat(octet as f32), place);
        }
        let (most, place) = (most.store(), place.store());
        let mut best = 0;
        for (lane, gain) in most.iter().enumerate() {
            if most.get(best).is_some_and(|most| gain > most) {
                best = lane;
            }
        }
        let octet = place.get(best).copied().unwrap_or_default() as usize;
        let value = |table: &[[f32; 8]]| {
            table.get(octet).and_then(|eight| eight.get(best)).copied().unwrap_or_default()
        };
        ((8 * octet + best) as u16, value(a), value(b))
    }

    /// The best entries of a group's vectors at a step; of variants, the better one.
    #[inline(always)]
    fn choose<S: Simd>(&self, simd: S, a: &[[f32; 8]], b: &[[f32; 8]], step: f32) -> Choice {
        let per_vector = self.octets * self.variants;
        let mut best = Choice { gain: f32::MIN, a: 0.0, b: 0.0, variant: 0, entries: [0; 8] };
        for variant in 0..self.variants {
            let mut choice = Choice { gain: 0.0, a: 0.0, b: 0.0, variant, entries: [0; 8] };
            let vectors = a.chunks_exact(per_vector).zip(b.chunks_exact(per_vector));
            for ((a, b), entry) in vectors.zip(&mut choice.entries) {
                let own = variant * self.octets..(variant + 1) * self.octets;
                let (Some(a), Some(b)) = (a.get(own.clone()), b.get(own)) else { continue };
                let (index, a, b) = self.nearest(simd, a, b, step);
                *entry = index;
                choice.a += a;
                choice.b += b;
            }
            choice.gain = step * (2.0 * choice.a - step * choice.b);
            if choice.gain > best.gain {
                best = choice;
            }
        }
        best
    }
}

/// The kernel of a format with a code book.
pub(super) struct GridKernel<B>(B);

impl<B: GridFormat> Kernel for GridKernel<B> {
    #[inline(always)]
    fn run<S: Simd>(simd: S, rows: &Rows<'_>, out: &mut [u8]) -> Result<(), FormatError> {
        let book = B::book();
        let count = 256 / B::ENTRY_LEN * book.octets * book.variants;
        let mut products = Products { a: vec![[0.0; 8]; count], b: vec![[0.0; 8]; count] };
        for (i, block) in as_blocks_mut::<B>(out)?.iter_mut().enumerate() {
            let (values, weights) = rows.group::<256>(i);
            *block = quantize::<S, B>(simd, book, values, weights, &mut products);
        }
        Ok(())
    }
}

#[inline(always)]
fn quantize<S: Simd, B: GridFormat>(
    simd: S,
    book: &Book,
    values: &[f32; 256],
    weights: &[f32; 256],
    products: &mut Products,
) -> B {
    let (mut x, mut signs) = (values.map(|value| value.clamp(-1e9, 1e9)), [0u8; 32]);
    if !B::SHIFTED {
        for ((x, w), signs) in
            x.as_chunks_mut::<8>().0.iter_mut().zip(weights.as_chunks::<8>().0).zip(&mut signs)
        {
            *signs = take_signs(x, w, B::EVEN_SIGNS);
        }
    }
    let per_vector = book.octets * book.variants;
    let vectors = x.chunks_exact(B::ENTRY_LEN).zip(weights.chunks_exact(B::ENTRY_LEN));
    let tables = products.a.chunks_exact_mut(per_vector).zip(products.b.chunks_exact_mut(per_vector));
    for ((x, w), (a, b)) in vectors.zip(tables) {
        book.multiply(simd, x, w, a, b);
    }

    // The best step of each group on its own.
    let per_group = B::GROUP / B::ENTRY_LEN * per_vector;
    let mut steps = [0.0f32; 16];
    let tables = || products.a.chunks_exact(per_group).zip(products.b.chunks_exact(per_group));
    for ((step, x), (a, b)) in steps.iter_mut().zip(x.chunks_exact(B::GROUP)).zip(tables()) {
        let extreme = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        if extreme == 0.0 {
            continue;
        }
        let mut most = 0.0;
        // Magnitudes that are all alike are entries of one level, of which every book has the smallest.
        let flat = extreme / book.smallest;
        for mut trial in PARTS.iter().map(|part| extreme / book.largest / part).chain([flat]) {
            // What the entries of a step fit to is another step, with entries of its own.
            for _ in 0..2 {
                let choice = book.choose(simd, a, b, trial);
                if choice.b <= 0.0 || choice.a <= 0.0 {
                    break;
                }
                let gain = choice.a * choice.a / choice.b;
                if gain > most {
                    (most, *step) = (gain, choice.a / choice.b);
                }
                trial = choice.a / choice.b;
            }
        }
    }

    // The scale of the block, and the integers of the groups: odd multiples of it.
    let largest = f32::from(2 * B::LARGEST_SCALE + 1);
    let mut scale = as_half(steps.iter().copied().fold(0.0, f32::max) / largest / B::UNIT);
    let mut best: Option<(f32, f32, [u8; 16], [Choice; 16])> = None;
    for _ in 0..3 {
        if scale <= 0.0 {
            break;
        }
        let unit = scale * B::UNIT;
        let mut integers = [0; 16];
        let empty = Choice { gain: 0.0, a: 0.0, b: 0.0, variant: 0, entries: [0; 8] };
        let mut choices = [empty; 16];
        let (mut total, mut product, mut square) = (0.0, 0.0, 0.0);
        let groups = integers.iter_mut().zip(&mut choices).zip(&steps);
        for (((integer, choice), step), (a, b)) in groups.zip(tables()) {
            let centre = ((step / unit - 1.0) / 2.0).round().clamp(0.0, f32::from(B::LARGEST_SCALE)) as u8;
            choice.gain = f32::MIN;
            for near in centre.saturating_sub(1)..=(centre + 1).min(B::LARGEST_SCALE) {
                let found = book.choose(simd, a, b, unit * f32::from(2 * near + 1));
                if found.gain > choice.gain {
                    (*choice, *integer) = (found, near);
                }
            }
            let odd = f32::from(2 * *integer + 1);
            total += choice.gain;
            product += odd * choice.a;
            square += odd * odd * choice.b;
        }
        if best.as_ref().is_none_or(|(most, ..)| total > *most) {
            best = Some((total, scale, integers, choices));
        }
        let fitted = as_half(if square > 0.0 { product / square / B::UNIT } else { 0.0 });
        if fitted == scale {
            break;
        }
        scale = fitted;
    }
    let Some((_, scale, integers, choices)) = best else { return bytemuck_zero::<B>() };
    finish::<B>(book, scale, &integers, &choices, signs)
}

/// The block of what was chosen.
fn finish<B: GridFormat>(
    book: &Book,
    scale: f32,
    integers: &[u8; 16],
    choices: &[Choice; 16],
    mut signs: [u8; 32],
) -> B {
    let per_group = B::GROUP / B::ENTRY_LEN;
    let one = B::BOOK.len();
    let mut indices = [0u16; 64];
    for (e, index) in indices.iter_mut().enumerate().take(256 / B::ENTRY_LEN) {
        let Some(choice) = choices.get(e / per_group) else { continue };
        let entry = usize::from(choice.entries.get(e % per_group).copied().unwrap_or_default());
        let down = entry >= one || choice.variant == 1;
        *index = (entry % one) as u16;
        if let Some(signs) = signs.get_mut(e * B::ENTRY_LEN / 8).filter(|_| B::SHIFTED) {
            *signs = if down { 0xff } else { 0 };
        }
    }
    debug_assert!(book.octets * 8 * book.variants >= one);
    let mut group_scales = [0; 16];
    for (g, group_scale) in group_scales.iter_mut().enumerate() {
        *group_scale = integers.get(g * 16 / B::GROUP).copied().unwrap_or_default();
    }
    B::pack(half_bytes(scale), &indices, &signs, &group_scales)
}

/// A block of zeros: its scale is zero.
fn bytemuck_zero<B: GridBlock>() -> B {
    bytemuck::Zeroable::zeroed()
}

/// Replaces eight values by their magnitudes, and returns the signs. If there must be an even number of negative ones, the
/// sign that matters least is changed.
#[inline(always)]
fn take_signs(x: &mut [f32; 8], w: &[f32; 8], even: bool) -> u8 {
    let (mut signs, mut least, mut place) = (0u8, f32::INFINITY, 0);
    for (i, (x, w)) in x.iter_mut().zip(w).enumerate() {
        if *x < 0.0 {
            signs |= 1 << i;
            *x = -*x;
        }
        if w * *x * *x < least {
            (least, place) = (w * *x * *x, i);
        }
    }
    if even && signs.count_ones() % 2 == 1 {
        signs ^= 1 << place;
        if let Some(x) = x.get_mut(place) {
            *x = -*x;
        }
    }
    signs
}
