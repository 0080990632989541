//! The angles of rotary embeddings, with YaRN's mix of extrapolated and interpolated frequencies.

use quadriga_graph::{Pairing, Rope};

/// Llama 2's heads, extended from a context of 4,096 tokens to four times as many.
fn extended() -> Rope {
    Rope { scale: 0.25, ext_factor: 1.0, original_context: 4096, ..Rope::new(128, Pairing::Half, 1e4) }
}

fn assert_close((a, b): (f64, f64), (c, d): (f64, f64)) {
    assert!((a - c).abs() <= 1e-12 * c.abs() && (b - d).abs() <= 1e-12, "{a}, {b} should be {c}, {d}");
}

/// The angle without scaling, by the definition.
fn plain_angle(position: i32, pair: usize) -> f64 {
    f64::from(position) / 1e4f64.powf(pair as f64 / 64.0)
}

#[test]
fn without_yarn_positions_are_scaled() {
    let rope = Rope { scale: 0.5, attn_factor: 1.5, ..Rope::new(128, Pairing::Half, 1e4) };
    for (position, pair) in [(0, 0), (7, 0), (1000, 20), (-3, 63)] {
        let theta = plain_angle(position, pair);
        assert_close(rope.angle(position, pair, 1.0), (theta / 2.0, 1.5));
        assert_close(rope.angle(position, pair, 4.0), (theta / 8.0, 1.5));
    }
}

#[test]
fn yarn_fades_between_the_pairs_of_32_rotations_and_of_one() {
    // 128 · ln(4096 / (32 · 2π)) / (2 · ln 10000) is 20.9, for one rotation it is 45.03.
    assert_eq!(extended().yarn_range(), (20.0, 46.0));
    // The range ends at the pairs that there are.
    let all_fast = Rope { dims: 8, base: 10.0, original_context: 1_000_000, ..extended() };
    assert_eq!(all_fast.yarn_range(), (14.0, 7.0));
    assert_eq!(Rope { original_context: 8, ..extended() }.yarn_range(), (0.0, 2.0));
}

#[test]
fn yarn_extrapolates_fast_pairs_and_interpolates_slow_ones() {
    let rope = extended();
    let magnitude = 1.0 + 0.1 * 4f64.ln();
    for pair in [0, 19, 20] {
        assert_close(rope.angle(1000, pair, 1.0), (plain_angle(1000, pair), magnitude));
    }
    for pair in [46, 47, 63] {
        assert_close(rope.angle(1000, pair, 1.0), (plain_angle(1000, pair) / 4.0, magnitude));
    }
    // Halfway between, the mean of both; with half the weight, a quarter of the way to the extrapolated angle.
    let theta = plain_angle(1000, 33);
    assert_close(rope.angle(1000, 33, 1.0), (theta * (0.5 + 0.5 / 4.0), magnitude));
    let half = Rope { ext_factor: 0.5, attn_factor: 2.0, ..rope };
    assert_close(half.angle(1000, 33, 1.0), (theta * (0.25 + 0.75 / 4.0), 2.0 * magnitude));
}
