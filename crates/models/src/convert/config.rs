//! `config.json`: values by their keys, with errors that name the key.

use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value};

use super::error::{ConvertError, ConvertResult, invalid, io_error, is_regular};

/// The longest file that is read where it has settings or a template. A JSON text takes up to 36 times its length in memory.
pub(super) const MAX_SETTINGS: u64 = 4 << 20;
/// The longest list of tokens or tensors: those of the largest published models are 35 MB long.
pub(super) const MAX_LIST: u64 = 64 << 20;
/// The longest SentencePiece model: published ones are up to 7 MB long.
pub(super) const MAX_PIECES: u64 = 16 << 20;

/// The configuration of a model.
#[derive(Clone, Debug)]
pub struct Config {
    values: Map<String, Value>,
    /// The name of the model's class.
    class: String,
}

/// Reads a file of at most `most` bytes.
pub(super) fn read_bytes(path: &Path, most: u64) -> ConvertResult<Vec<u8>> {
    is_regular(path)?;
    let file = std::fs::File::open(path).map_err(io_error("read", path))?;
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes).map_err(io_error("read", path))?;
    if bytes.len() as u64 > most {
        let reason = format!("it is longer than the {most} bytes that such a file may have");
        return Err(invalid(path.display().to_string(), "size", reason));
    }
    Ok(bytes)
}

/// Reads a text of at most `most` bytes.
pub(super) fn read_text(path: &Path, most: u64) -> ConvertResult<String> {
    String::from_utf8(read_bytes(path, most)?).map_err(|error| {
        let place = format!("byte {}", error.utf8_error().valid_up_to());
        invalid(path.display().to_string(), place, "it is not UTF-8")
    })
}

/// Reads a JSON object of at most `most` bytes.
pub(super) fn read_object(path: &Path, most: u64) -> ConvertResult<Map<String, Value>> {
    parse_object(&read_bytes(path, most)?, &path.display().to_string())
}

/// The object of a JSON text.
pub(super) fn parse_object(bytes: &[u8], file: &str) -> ConvertResult<Map<String, Value>> {
    serde_json::from_slice(bytes).map_err(|error| {
        invalid(file, format!("line {} column {}", error.line(), error.column()), error.to_string())
    })
}

impl Config {
    /// The configuration in a JSON text; `file` names it in errors.
    pub fn parse(bytes: &[u8], file: &str) -> ConvertResult<Config> {
        Config::new(parse_object(bytes, file)?)
    }

    /// Reads a file.
    pub fn open(path: &Path) -> ConvertResult<Config> {
        Config::new(read_object(path, MAX_SETTINGS)?)
    }

    fn new(mut values: Map<String, Value>) -> ConvertResult<Config> {
        let class = values.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
        let Some(class) = class.map(str::to_owned) else {
            return Err(invalid("config.json", "architectures", "it names no class of models"));
        };
        // Models that also see images have the text model's values in an object of its own.
        for part in ["text_config", "llm_config"] {
            if let Some(Value::Object(inner)) = values.remove(part) {
                values.extend(inner);
            }
        }
        Ok(Config { values, class })
    }

    /// The name of the model's class, such as `LlamaForCausalLM`.
    pub fn class(&self) -> &str {
        &self.class
    }

    /// The value of the first of these keys that is there and not null.
    pub(super) fn value(&self, keys: &[&str]) -> Option<&Value> {
        keys.iter().filter_map(|key| self.values.get(*key)).find(|value| !value.is_null())
    }

    fn wrong(keys: &[&str], value: &Value, expected: &str) -> ConvertError {
        let text = value.to_string();
        let shown: String = text.chars().take(60).collect();
        invalid(
            "config.json",
            keys.first().copied().unwrap_or_default(),
            format!("should be {expected}, but is {shown}"),
        )
    }

    /// The first of these keys, as a whole number of at most 2^31.
    pub(super) fn find_count(&self, keys: &[&str]) -> ConvertResult<Option<usize>> {
        let Some(value) = self.value(keys) else { return Ok(None) };
        let number = value
            .as_u64()
            .or_else(|| value.as_f64().filter(|f| f.fract() == 0.0 && *f >= 0.0).map(|f| f as u64));
        match number.filter(|number| *number <= 1 << 31) {
            Some(number) => Ok(Some(number as usize)),
            None => Err(Config::wrong(keys, value, "a whole number")),
        }
    }

    /// The same for a key that must be there.
    pub(super) fn count(&self, keys: &[&str]) -> ConvertResult<usize> {
        self.find_count(keys)?.ok_or_else(|| self.missing(keys))
    }

    pub(super) fn missing(&self, keys: &[&str]) -> ConvertError {
        ConvertError::MissingKey {
            file: "config.json".to_owned(),
            key: keys.first().copied().unwrap_or_default().to_owned(),
            architecture: self.class.clone(),
        }
    }

    /// A number.
    pub(super) fn find_number(&self, keys: &[&str]) -> ConvertResult<Option<f64>> {
        let Some(value) = self.value(keys) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| Config::wrong(keys, value, "a number"))
    }

    /// A flag.
    pub(super) fn flag(&self, key: &str) -> ConvertResult<Option<bool>> {
        let Some(value) = self.value(&[key]) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| Config::wrong(&[key], value, "true or false"))
    }

    /// A text.
    pub(super) fn text(&self, keys: &[&str]) -> ConvertResult<Option<&str>> {
        let Some(value) = self.value(keys) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| Config::wrong(keys, value, "a text"))
    }

    /// The rows and columns of the blocks of FP8 weights that share a scale, as `quantization_config` names them: fine-grained FP8
    /// and compressed-tensors have different keys.
    pub(super) fn scale_block(&self) -> ConvertResult<Option<[usize; 2]>> {
        let Some(own) = self.object(&["quantization_config", "compression_config"])? else { return Ok(None) };
        let group = own.value(&["config_groups"]).and_then(Value::as_object).and_then(|groups| {
            groups.values().find_map(|group| group.get("weights")?.get("block_structure"))
        });
        let Some(value) = own.value(&["weight_block_size"]).or(group.filter(|value| !value.is_null())) else {
            return Ok(None);
        };
        let size = |value: &Value| value.as_u64().and_then(|size| usize::try_from(size).ok());
        let sizes: Option<Vec<usize>> = value.as_array().and_then(|list| list.iter().map(size).collect());
        match sizes.as_deref() {
            Some([rows, columns]) if *rows > 0 && *columns > 0 => Ok(Some([*rows, *columns])),
            _ => Err(Config::wrong(
                &["quantization_config.weight_block_size"],
                value,
                "two whole numbers, rows and columns",
            )),
        }
    }

    /// A list of texts, one per layer.
    pub(super) fn texts(&self, key: &str) -> ConvertResult<Option<Vec<&str>>> {
        let Some(value) = self.value(&[key]) else { return Ok(None) };
        let list = value.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        list.map(Some).ok_or_else(|| Config::wrong(&[key], value, "a list of texts"))
    }

    /// A list of numbers.
    pub(super) fn numbers(&self, key: &str) -> ConvertResult<Option<Vec<f64>>> {
        let Some(value) = self.value(&[key]) else { return Ok(None) };
        let list = value.as_array().and_then(|list| list.iter().map(Value::as_f64).collect());
        list.map(Some).ok_or_else(|| Config::wrong(&[key], value, "a list of numbers"))
    }

    /// An object within the configuration, as a configuration of the same class.
    pub(super) fn object(&self, keys: &[&str]) -> ConvertResult<Option<Config>> {
        match self.value(keys) {
            None => Ok(None),
            Some(Value::Object(values)) => {
                Ok(Some(Config { values: values.clone(), class: self.class.clone() }))
            }
            Some(other) => Err(Config::wrong(keys, other, "an object")),
        }
    }

    /// An error that a value is not supported.
    pub(super) fn unsupported(&self, key: &str, value: impl ToString) -> ConvertError {
        ConvertError::Unsupported {
            key: key.to_owned(),
            value: value.to_string(),
            architecture: self.class.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_checked_and_errors_name_the_key() {
        let config = Config::parse(
            br#"{"architectures":["X"],"a":3,"b":"t","c":null,"text_config":{"d":2.0,"e":-1}}"#,
            "config.json",
        )
        .unwrap();
        assert_eq!(
            (config.class(), config.count(&["z", "a"]).unwrap(), config.count(&["d"]).unwrap()),
            ("X", 3, 2)
        );
        assert_eq!(config.find_count(&["c"]).unwrap(), None);
        for (key, part) in [("b", "a whole number"), ("e", "a whole number"), ("z", "no z")] {
            let error = config.count(&[key]).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("config.json"), "{error}");
        }
        for broken in ["", "{", "[]", "{}", r#"{"architectures":[]}"#, r#"{"architectures":"X"}"#] {
            assert!(Config::parse(broken.as_bytes(), "config.json").is_err(), "{broken}");
        }
    }
}
