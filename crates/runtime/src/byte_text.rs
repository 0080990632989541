//! Numbers of bytes, for people.

/// Bytes with a binary unit: `96.0 MiB`.
///
/// ```
/// use quadriga_runtime::byte_text;
///
/// assert_eq!([byte_text(0), byte_text(1536), byte_text(6 << 30)], ["0 B", "1.5 KiB", "6.0 GiB"]);
/// ```
pub fn byte_text(bytes: u64) -> String {
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let (mut value, mut unit) = (bytes as f64 / 1024.0, "KiB");
    for larger in ["MiB", "GiB", "TiB", "PiB"] {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, larger);
    }
    // Rounds half up, as the plan page's `toFixed` does.
    format!("{:.1} {unit}", (value * 10.0).round() / 10.0)
}

/// What an error says about free memory.
pub(crate) fn free_text(free: &Option<u64>) -> String {
    free.map_or_else(String::new, |free| format!(", {} are free", byte_text(free)))
}

#[cfg(test)]
mod tests {
    use super::byte_text;

    #[test]
    fn the_unit_is_the_largest_of_which_there_is_one() {
        let texts =
            [1023, 1024, (1 << 20) - 1, 1 << 20, 98_765_432, 3 << 39, 5 << 50, 7 << 60].map(byte_text);
        let expected =
            ["1023 B", "1.0 KiB", "1024.0 KiB", "1.0 MiB", "94.2 MiB", "1.5 TiB", "5.0 PiB", "7168.0 PiB"];
        assert_eq!(texts, expected);
    }
}
