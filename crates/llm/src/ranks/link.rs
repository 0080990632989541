//! The link between ranks: how long collectives take.

use std::fmt;
use std::str::FromStr;

/// What connects ranks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Link {
    /// Bytes per second of each rank, in either direction.
    pub bytes_per_second: f64,
    /// Seconds until a small message has arrived.
    pub latency: f64,
    /// Whether ranks are on one machine, and exchange data through memory that all of them have mapped.
    pub is_memory: bool,
}

/// The most ranks that exchange data through memory.
const MAX_IN_MEMORY: usize = 8;

impl Link {
    /// Memory of one machine: what two processes of an ordinary one reach through shared memory, in which a sum of 576 floats took 0.4 to
    /// 1.4 µs and one of 4096 took 3 to 12 µs.
    pub const MEMORY: Link = Link { bytes_per_second: 5e9, latency: 0.5e-6, is_memory: true };
    /// An ordinary network of a cluster: 25 Gbit/s.
    pub const NETWORK: Link =
        Link { bytes_per_second: 25e9 / 8.0, latency: NETWORK_LATENCY, is_memory: false };

    /// Seconds of an all-reduce of so many bytes: a sum that is passed around and back, or in memory, where each rank writes its own
    /// values and adds those of all others.
    pub fn all_reduce(&self, ranks: usize, bytes: f64) -> f64 {
        if self.meets_in_memory(ranks) {
            return self.latency + ranks as f64 * bytes / self.bytes_per_second;
        }
        2.0 * self.all_gather(ranks, bytes)
    }

    /// Seconds in which every rank gets so many bytes, of which each has a part.
    pub fn all_gather(&self, ranks: usize, bytes: f64) -> f64 {
        if self.meets_in_memory(ranks) {
            return self.latency + bytes / self.bytes_per_second;
        }
        let steps = f64::from(ranks.max(1).next_power_of_two().trailing_zeros());
        steps * self.latency + share_sent(ranks) * bytes / self.bytes_per_second
    }

    /// Seconds in which every rank gets the bytes of one: those that have them pass them on.
    pub fn broadcast(&self, ranks: usize, bytes: f64) -> f64 {
        if self.meets_in_memory(ranks) {
            return self.send(bytes);
        }
        f64::from(ranks.max(1).next_power_of_two().trailing_zeros()) * self.send(bytes)
    }

    /// Whether a collective of so many ranks is one meeting in memory.
    fn meets_in_memory(&self, ranks: usize) -> bool {
        self.is_memory && (2..=MAX_IN_MEMORY).contains(&ranks)
    }

    /// Seconds until a message has arrived.
    pub fn send(&self, bytes: f64) -> f64 {
        self.latency + bytes / self.bytes_per_second
    }
}

/// Seconds that a small message takes through a network's cards and a switch.
const NETWORK_LATENCY: f64 = 10e-6;

/// The share of the bytes that each of so many ranks sends.
fn share_sent(ranks: usize) -> f64 {
    (ranks.max(1) - 1) as f64 / ranks.max(1) as f64
}

impl FromStr for Link {
    type Err = String;

    /// Bits per second as networks are named, with their unit, and a latency: `25G`, `100G,2us`, `1.5T`; or `memory` for ranks of one
    /// machine.
    fn from_str(text: &str) -> Result<Link, String> {
        if text == "memory" {
            return Ok(Link::MEMORY);
        }
        let wrong = || {
            "must be bits per second with a unit (k, M, G or T) and perhaps a latency, such as 25G or 100G,2us, or memory".to_owned()
        };
        let (rate, latency) =
            text.split_once(',').map_or((text, None), |(rate, latency)| (rate, Some(latency)));
        let digits = rate.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let factor = match rate.get(digits.len()..).unwrap_or_default() {
            "k" | "K" => 1e3,
            "M" => 1e6,
            "G" => 1e9,
            "T" => 1e12,
            _ => return Err(wrong()),
        };
        let positive =
            |text: &str| text.parse::<f64>().ok().filter(|number| number.is_finite() && *number > 0.0);
        let bits = positive(digits).ok_or_else(wrong)? * factor;
        let latency = match latency {
            None => NETWORK_LATENCY,
            Some(latency) => {
                let units = [("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("ns", 1e-9), ("s", 1.0)];
                let found = units
                    .iter()
                    .find_map(|(unit, factor)| Some(positive(latency.strip_suffix(unit)?)? * factor));
                found.ok_or_else(wrong)?
            }
        };
        Ok(Link { bytes_per_second: bits / 8.0, latency, is_memory: false })
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_memory {
            return f.write_str("memory");
        }
        // Three digits, without the zeros at the end.
        let rounded = |number: f64| {
            let digits = (2.0 - number.log10().floor()).clamp(0.0, 12.0) as usize;
            let text = format!("{number:.digits$}");
            match text.contains('.') {
                true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
                false => text,
            }
        };
        write!(f, "{} Gbit/s and {} µs", rounded(self.bytes_per_second * 8e-9), rounded(self.latency * 1e6))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_named_in_bits() {
        assert_eq!("25G".parse(), Ok(Link::NETWORK));
        assert_eq!("memory".parse(), Ok(Link::MEMORY));
        assert_eq!("100G,2us".parse::<Link>().unwrap().to_string(), "100 Gbit/s and 2 µs");
        for (text, shown) in [
            ("memory", "memory"),
            ("25G", "25 Gbit/s and 10 µs"),
            ("1.5T,700ns", "1500 Gbit/s and 0.7 µs"),
            ("33.3333M,1ms", "0.0333 Gbit/s and 1000 µs"),
            ("1k,3us", "0.000001 Gbit/s and 3 µs"),
        ] {
            assert_eq!(text.parse::<Link>().unwrap().to_string(), shown, "{text}");
        }
        for text in ["", "G", "25", "25,2us", "25X", "0G", "-1G", "25G,", "25G,2", "25G,0us"] {
            assert!(text.parse::<Link>().is_err(), "{text}");
        }
    }

    #[test]
    fn one_rank_exchanges_nothing_and_more_take_more_steps() {
        let link = Link { bytes_per_second: 1e9, latency: 1e-6, is_memory: false };
        assert_eq!(link.all_reduce(1, 1e6), 0.0);
        assert_eq!(link.all_reduce(2, 0.0), 2e-6);
        assert_eq!(link.all_reduce(8, 0.0), 6e-6);
        assert!((link.all_reduce(4, 1e6) - (4e-6 + 1.5e-3)).abs() < 1e-12);
        // In memory all meet once, and each reads the values of all.
        let memory = Link { is_memory: true, ..link };
        assert_eq!((memory.all_reduce(1, 1e6), memory.all_gather(1, 1e6)), (0.0, 0.0));
        assert!((memory.all_reduce(2, 1e6) - (1e-6 + 2e-3)).abs() < 1e-12);
        assert!((memory.all_gather(4, 1e6) - (1e-6 + 1e-3)).abs() < 1e-12);
        assert_eq!((link.broadcast(1, 1e6), memory.broadcast(4, 1e6)), (0.0, memory.send(1e6)));
        assert!((link.broadcast(5, 1e6) - 3.0 * link.send(1e6)).abs() < 1e-12);
        assert_eq!(memory.all_reduce(9, 1e6), link.all_reduce(9, 1e6), "no memory is shared by so many");
    }
}
