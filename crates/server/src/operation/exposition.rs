//! The text format of Prometheus: all samples of a name follow one description of it.

use std::fmt::Write as _;

/// Samples by name, in the order in which names came first.
#[derive(Debug, Default)]
pub(crate) struct Exposition {
    families: Vec<Family>,
}

#[derive(Debug)]
struct Family {
    name: &'static str,
    /// The lines about it, and its samples.
    text: String,
}

impl Exposition {
    /// A sample of a counter or a gauge. Labels are as in `a="b",c="d"`.
    pub(crate) fn sample(
        &mut self,
        name: &'static str,
        kind: &str,
        help: &str,
        labels: &str,
        value: impl std::fmt::Display,
    ) {
        let text = self.family(name, kind, help);
        // Writing to a string does not fail.
        let _ = match labels {
            "" => writeln!(text, "{name} {value}"),
            labels => writeln!(text, "{name}{{{labels}}} {value}"),
        };
    }

    /// The text of a name, with its description.
    pub(crate) fn family(&mut self, name: &'static str, kind: &str, help: &str) -> &mut String {
        let at = self.families.iter().position(|family| family.name == name).unwrap_or(self.families.len());
        if at == self.families.len() {
            let text = format!("# HELP {name} {help}.\n# TYPE {name} {kind}\n");
            self.families.push(Family { name, text });
        }
        #[allow(clippy::indexing_slicing, reason = "it was found, or pushed just now")]
        &mut self.families[at].text
    }

    /// The whole text.
    pub(crate) fn text(self) -> String {
        self.families.into_iter().map(|family| family.text).collect()
    }
}

/// A value of a label, as it is written between quotes.
pub(crate) fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_a_name_are_together() {
        let mut exposition = Exposition::default();
        exposition.sample("a", "gauge", "First", "m=\"1\"", 1);
        exposition.sample("b", "counter", "Second", "", 2.5);
        exposition.sample("a", "gauge", "First", "m=\"2\"", 3);
        let wanted = "# HELP a First.\n# TYPE a gauge\na{m=\"1\"} 1\na{m=\"2\"} 3\n# HELP b Second.\n# TYPE b counter\nb 2.5\n";
        assert_eq!(exposition.text(), wanted);
        assert_eq!(escaped("a\"b\\\n"), "a\\\"b\\\\\\n");
    }
}
