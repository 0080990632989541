//! The requests of a batch: one JSON object in each line.

use quadriga_llm::sampling::SamplingOptions;
use quadriga_llm::serving::Request;
use quadriga_llm::template::Message;
use quadriga_llm::{GeneratorOptions, Model};
use serde_json::{Map, Value};

use crate::answer::grammar;

/// A line of the file.
pub(super) struct BatchLine {
    pub(super) id: Option<Value>,
    body: Map<String, Value>,
    messages: Vec<Message>,
    /// Whether it is a text that the model continues, as of `/v1/completions`: no template is applied, and control tokens that are
    /// spelled out are those tokens.
    is_raw: bool,
}

/// Fields of a request that have an effect.
const FIELDS: &[&str] = &[
    "messages",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repeat_penalty",
    "logprobs",
    "top_logprobs",
    "response_format",
    "json_schema",
    "grammar",
];

/// Fields that clients send with every request, and that change no answer here: the model is that of the command, and results
/// come in one piece.
const IGNORED: &[&str] = &["id", "model", "user", "metadata", "store", "service_tier"];

/// Fields of a line beside its body in OpenAI's batch files.
const BESIDE_BODY: &[&str] = &["id", "method", "url"];

/// The addresses that lines of OpenAI's batch files may have, each with the field of its requests.
const URLS: [(&str, &str); 2] = [("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")];

impl BatchLine {
    /// Parses a line. An error says what is wrong with it.
    pub(super) fn parse(line: &str) -> Result<BatchLine, String> {
        let value: Value = serde_json::from_str(line).map_err(|error| {
            // Its line is that of the file; the parser has seen one.
            let text = error.to_string();
            match text.split_once(" at line ") {
                Some((reason, _)) => format!("it is no JSON: {reason} at column {}", error.column()),
                None => format!("it is no JSON: {text}"),
            }
        })?;
        let Value::Object(mut object) = value else {
            return Err("not a JSON object".to_owned());
        };
        let id = object.remove("custom_id").or_else(|| object.remove("id"));
        // As in OpenAI's batch files.
        let (body, is_openai) = match object.remove("body") {
            Some(Value::Object(body)) => {
                refuse_unknown(&object, |name, _| BESIDE_BODY.contains(&name))?;
                check_url(object.get("url"), &body)?;
                (body, true)
            }
            Some(_) => return Err("\"body\" must be an object".to_owned()),
            None => (object, false),
        };
        refuse_unknown(&body, |name, value| match name {
            "n" => value == &Value::from(1),
            "stream" => value == &Value::Bool(false),
            _ => FIELDS.contains(&name) || IGNORED.contains(&name),
        })?;
        let messages = match (body.get("messages"), body.get("prompt")) {
            (Some(_), Some(_)) => return Err("it has both \"messages\" and \"prompt\"".to_owned()),
            (Some(messages), None) => {
                serde_json::from_value(messages.clone()).map_err(|error| format!("\"messages\": {error}"))?
            }
            (None, Some(Value::String(prompt))) => vec![Message::new("user", prompt.clone())],
            (None, Some(_)) => return Err("\"prompt\" must be a string".to_owned()),
            (None, None) => return Err("it has neither \"messages\" nor \"prompt\"".to_owned()),
        };
        let is_raw = is_openai && body.contains_key("prompt");
        Ok(BatchLine { id, body, messages, is_raw })
    }

    /// The request, with the command's options where it has none of its own.
    pub(super) fn request(
        &self,
        model: &Model,
        options: &GeneratorOptions,
        index: usize,
    ) -> Result<Request, String> {
        let sampling = &options.sampling;
        let float = |name: &str, default: f32| -> Result<f32, String> {
            match self.field(name) {
                None => Ok(default),
                Some(value) => value
                    .as_f64()
                    .map(|number| number as f32)
                    .ok_or_else(|| format!("{name:?} must be a number")),
            }
        };
        let whole = |name: &str| -> Result<Option<u64>, String> {
            match self.field(name) {
                None => Ok(None),
                Some(value) => value
                    .as_u64()
                    .map(Some)
                    .ok_or_else(|| format!("{name:?} must be a number that is not negative")),
            }
        };
        let count = |name: &str| -> Result<Option<usize>, String> {
            Ok(whole(name)?.map(|number| usize::try_from(number).unwrap_or(usize::MAX)))
        };
        let sampling = SamplingOptions {
            temperature: float("temperature", sampling.temperature)?,
            top_k: count("top_k")?.unwrap_or(sampling.top_k),
            top_p: float("top_p", sampling.top_p)?,
            min_p: float("min_p", sampling.min_p)?,
            presence_penalty: float("presence_penalty", sampling.presence_penalty)?,
            frequency_penalty: float("frequency_penalty", sampling.frequency_penalty)?,
            repeat_penalty: float("repeat_penalty", sampling.repeat_penalty)?,
            // Requests with the same prompt get different answers.
            seed: whole("seed")?.unwrap_or_else(|| sampling.seed.wrapping_add(index as u64)),
            ..sampling.clone()
        };
        let stops = match self.field("stop") {
            None => options.stops.clone(),
            Some(Value::String(stop)) => vec![stop.clone()],
            Some(list) => serde_json::from_value(list.clone())
                .map_err(|_| "\"stop\" must be a string or a list of them")?,
        };
        let logprobs = match self.field("logprobs") {
            None | Some(Value::Bool(false)) => None,
            Some(Value::Bool(true)) => Some(count("top_logprobs")?.unwrap_or(0)),
            Some(_) => count("logprobs")?,
        };
        let max_tokens = count("max_tokens")?.or(count("max_completion_tokens")?).or(options.max_tokens);
        let grammar = grammar::of_fields(|name| self.field(name))?.or_else(|| options.grammar.clone());
        let (raw, special) = (options.raw || self.is_raw, options.special || self.is_raw);
        let options = &GeneratorOptions { grammar, raw, special, ..options.clone() };
        let request = Request::chat(model, options, &self.messages).map_err(|error| error.to_string())?;
        Ok(Request { sampling, stops, logprobs, max_tokens, ..request })
    }

    /// A field that is there and not null.
    fn field(&self, name: &str) -> Option<&Value> {
        self.body.get(name).filter(|value| !value.is_null())
    }
}

/// An error unless a line of OpenAI's batch files has the address of a request that is answered, with the field of such requests.
fn check_url(url: Option<&Value>, body: &Map<String, Value>) -> Result<(), String> {
    let Some(url) = url.filter(|url| !url.is_null()) else { return Ok(()) };
    match URLS.iter().find(|(known, _)| url == known) {
        Some((_, field)) if body.contains_key(*field) => Ok(()),
        Some((url, field)) => Err(format!("a request for {url} has {field:?} in its body")),
        None => {
            let [(chat, _), (text, _)] = URLS;
            Err(format!("\"url\" must be {chat:?} or {text:?}, not {url}"))
        }
    }
}

/// An error with the first field that is neither null nor known: its request would get the answer to another question.
fn refuse_unknown(
    fields: &Map<String, Value>,
    is_known: impl Fn(&str, &Value) -> bool,
) -> Result<(), String> {
    let unknown = fields.iter().find(|(name, value)| !value.is_null() && !is_known(name, value));
    match unknown.map(|(name, _)| name.as_str()) {
        None => Ok(()),
        Some("n") => Err("\"n\" must be 1: write a line for each answer".to_owned()),
        Some("stream") => Err("\"stream\" must be false: results come in one piece".to_owned()),
        Some(name) => Err(format!("unknown field {name:?}")),
    }
}
