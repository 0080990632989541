//! Byte sizes on the command line.

pub(crate) use quadriga_view::format::bytes as text;

/// Parses a number of bytes with an optional binary unit: `6G`, `512M`, `1.5GiB`, `1000000`.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let wrong = || "must be a number of bytes, such as 6G, 512M or 1000000".to_owned();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let unit = unit.trim().to_ascii_lowercase();
    let factor = match unit.trim_end_matches("ib").trim_end_matches('b') {
        "" => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        _ => return Err(wrong()),
    };
    Ok((number * 1024f64.powi(factor)) as u64)
}

/// Parses a number of bytes of which there must be one.
pub(crate) fn parse_positive(text: &str) -> Result<u64, String> {
    match parse(text)? {
        0 => Err("must be at least 1 byte".to_owned()),
        bytes => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_with_units_are_parsed() {
        assert_eq!(parse("6G"), Ok(6 << 30));
        assert_eq!(parse("1.5GiB"), Ok(3 << 29));
        assert_eq!(parse("512 mb"), Ok(512 << 20));
        assert_eq!(parse("1000"), Ok(1000));
        assert!(["", "G", "6X", "-1", "1..2"].iter().all(|text| parse(text).is_err()));
    }
}
