//! Dates for chat templates.

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// A date and time (UTC) in the format of C's `strftime`, as far as chat templates use it.
pub(super) fn date(format: &str, seconds: u64) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let days = seconds / 86_400;
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let (year, month, day) = civil(days);
    let month_name = MONTHS.get(month as usize - 1).copied().unwrap_or_default();
    let day_name = DAYS.get((days % 7) as usize).copied().unwrap_or_default();
    let mut text = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            text.push(letter);
            continue;
        }
        match letters.next() {
            Some('Y') => text.push_str(&year.to_string()),
            Some('y') => text.push_str(&format!("{:02}", year % 100)),
            Some('m') => text.push_str(&format!("{month:02}")),
            Some('d') => text.push_str(&format!("{day:02}")),
            Some('e') => text.push_str(&format!("{day:2}")),
            Some('B') => text.push_str(month_name),
            Some('b') => text.push_str(month_name.get(..3).unwrap_or_default()),
            Some('A') => text.push_str(day_name),
            Some('a') => text.push_str(day_name.get(..3).unwrap_or_default()),
            Some('H') => text.push_str(&format!("{hour:02}")),
            Some('M') => text.push_str(&format!("{minute:02}")),
            Some('S') => text.push_str(&format!("{second:02}")),
            Some('%') => text.push('%'),
            Some(other) => text.extend(['%', other]),
            None => text.push('%'),
        }
    }
    text
}

/// Year, month and day of a day counted from 1 January 1970.
fn civil(days: u64) -> (u64, u64, u64) {
    let leap = |year: u64| (year.is_multiple_of(4) && !year.is_multiple_of(100)) || year.is_multiple_of(400);
    // The calendar repeats every 400 years, which have 146,097 days.
    let (mut year, mut left) = (1970 + days / 146_097 * 400, days % 146_097);
    while left >= 365 + u64::from(leap(year)) {
        left -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    for (month, length) in (1..).zip(lengths) {
        if left < length {
            return (year, month, left + 1);
        }
        left -= length;
    }
    (year, 12, 31)
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn dates_are_right() {
        assert_eq!(date("%A %d %B %Y %H:%M:%S", 0), "Thursday 01 January 1970 00:00:00");
        assert_eq!(date("%H:%M:%S %H", 12_345_678), "21:21:18 21");
        assert_eq!(date("%d %b %Y", 951_782_400), "29 Feb 2000");
        for (seconds, day) in [
            (2_678_399, "31 January 1970"),
            (2_678_400, "1 February 1970"),
            (68_169_600, "29 February 1972"),
            (68_256_000, "1 March 1972"),
            (1_704_067_199, "31 December 2023"),
            (4_107_542_400, "1 March 2100"),
            (4_107_456_000, "28 February 2100"),
            (13_574_563_200, "29 February 2400"),
            (253_402_300_799, "31 December 9999"),
        ] {
            assert_eq!(date("%e %B %Y", seconds).trim_start(), day, "{seconds}");
        }
        // This was written in 2026.
        let year: u64 = date("%Y", super::now()).parse().unwrap_or(0);
        assert!((2026..3000).contains(&year), "{year}");
        assert_eq!(date("%Y-%m-%d %a %e %y 100%% %q %", 1_735_689_599), "2024-12-31 Tue 31 24 100% %q %");
    }
}
