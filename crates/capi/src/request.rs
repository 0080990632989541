//! What an answer is to be like: sampling, length, stop strings, grammars.

use std::ffi::{c_char, c_void};

use quadriga::llm::constraint::Grammar;
use quadriga::llm::sampling::{DryOptions, HookError, SamplingHook, SamplingOptions};
use quadriga::llm::template::Message;

use crate::arguments::{Parameters, UserData, array, optional_text, text};
use crate::status::{Failure, Outcome, qd_error};

/// Sees the logits before a token is sampled, and may change them: -INFINITY excludes a token. `tokens` are those of the
/// prompt and of the answer so far. 0 to go on, anything else to end the answer with an error.
pub type qd_logits_callback = Option<
    extern "C" fn(
        user_data: *mut c_void,
        tokens: *const u32,
        token_count: usize,
        logits: *mut f32,
        logit_count: usize,
    ) -> i32,
>;

/// A number that is added to a token's logit.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qd_logit_bias {
    /// The token.
    pub token: u32,
    /// The number; -INFINITY bans the token.
    pub bias: f32,
}

/// What an answer is to be like. The names are llama.cpp's.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qd_request_params {
    /// The size of this structure.
    pub struct_size: usize,
    /// The most tokens of the answer; 0: as many as the context has room for.
    pub max_tokens: usize,
    /// The sampling temperature; 0 always takes the most probable token.
    pub temperature: f32,
    /// Keep the K most probable tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the most probable tokens up to this sum of probabilities; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens with at least this share of the largest probability; 0 keeps all.
    pub min_p: f32,
    /// Locally typical sampling; 1 keeps all.
    pub typical_p: f32,
    /// Keep tokens whose logit is within so many standard deviations of the largest; 0 keeps all.
    pub top_n_sigma: f32,
    /// The probability that XTC removes the most probable tokens; 0 disables it.
    pub xtc_probability: f32,
    /// The probability above which XTC counts a token.
    pub xtc_threshold: f32,
    /// Repetition penalty; 1 disables it.
    pub repeat_penalty: f32,
    /// The number of recent tokens for the penalties.
    pub repeat_last_n: u32,
    /// Presence penalty; 0 disables it.
    pub presence_penalty: f32,
    /// Frequency penalty; 0 disables it.
    pub frequency_penalty: f32,
    /// The factor of the DRY penalty; 0 disables it.
    pub dry_multiplier: f32,
    /// The base of its growth.
    pub dry_base: f32,
    /// The longest repetition that it allows.
    pub dry_allowed_length: u32,
    /// The number of recent tokens that it looks at.
    pub dry_last_n: u32,
    /// 1: end-of-generation tokens are banned.
    pub ignore_eos: i32,
    /// The random seed.
    pub seed: u64,
    /// 1: random numbers start with the seed. 0: a generator's continue from its previous answer.
    pub reseed: i32,
    /// Numbers that are added to logits.
    pub logit_biases: *const qd_logit_bias,
    /// How many.
    pub logit_bias_count: usize,
    /// Stop strings: the answer ends before the first of them.
    pub stops: *const *const c_char,
    /// How many.
    pub stop_count: usize,
    /// The answer is JSON that satisfies this schema, or NULL. Of the four constraints at most one is given.
    pub json_schema: *const c_char,
    /// The answer belongs to this grammar in llama.cpp's GBNF, or NULL.
    pub grammar: *const c_char,
    /// The answer belongs to this grammar in llguidance's Lark, or NULL.
    pub lark: *const c_char,
    /// The answer matches this regular expression, or NULL.
    pub regex: *const c_char,
    /// 1: prompts are used as they are, without the chat template.
    pub raw: i32,
    /// 1: control tokens that are spelled out in messages become those tokens. Not for text of users.
    pub special: i32,
    /// The system prompt of conversations that begin with no system message, or NULL.
    pub system: *const c_char,
    /// Keyword arguments of the chat template, and the list "tools", as a JSON object, or NULL.
    pub template_variables: *const c_char,
    /// Sees and changes logits, on the thread that generates, or NULL.
    pub logits_callback: qd_logits_callback,
    /// For the callback.
    pub logits_data: *mut c_void,
    /// Of a service: requests of higher priority are started first.
    pub priority: i32,
    /// Of a service: clients of one priority get equal shares.
    pub client: u64,
    /// Of a service: requests share prefixes of the KV cache only with those of the same salt.
    pub salt: u64,
}

// SAFETY: numbers, addresses, and a function that may be NULL; the first field is the size.
unsafe impl Parameters for qd_request_params {
    const NAME: &'static str = "qd_request_params";

    fn defaults() -> qd_request_params {
        let sampling = SamplingOptions::default();
        let short = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        qd_request_params {
            struct_size: size_of::<qd_request_params>(),
            max_tokens: 0,
            temperature: sampling.temperature,
            top_k: short(sampling.top_k),
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            typical_p: sampling.typical_p,
            top_n_sigma: sampling.top_n_sigma,
            xtc_probability: sampling.xtc_probability,
            xtc_threshold: sampling.xtc_threshold,
            repeat_penalty: sampling.repeat_penalty,
            repeat_last_n: short(sampling.repeat_last_n),
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            dry_multiplier: sampling.dry.multiplier,
            dry_base: sampling.dry.base,
            dry_allowed_length: short(sampling.dry.allowed_length),
            dry_last_n: short(sampling.dry.last_n),
            ignore_eos: 0,
            seed: sampling.seed,
            reseed: 1,
            logit_biases: std::ptr::null(),
            logit_bias_count: 0,
            stops: std::ptr::null(),
            stop_count: 0,
            json_schema: std::ptr::null(),
            grammar: std::ptr::null(),
            lark: std::ptr::null(),
            regex: std::ptr::null(),
            raw: 0,
            special: 0,
            system: std::ptr::null(),
            template_variables: std::ptr::null(),
            logits_callback: None,
            logits_data: std::ptr::null_mut(),
            priority: 0,
            client: 0,
            salt: 0,
        }
    }
}

/// The default parameters of a request.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn qd_request_default_params() -> qd_request_params {
    qd_request_params::defaults()
}

/// A message of a conversation.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct qd_message {
    /// "system", "user", "assistant" or "tool".
    pub role: *const c_char,
    /// The text.
    pub content: *const c_char,
}

/// The parameters of a request as the library has them.
pub(crate) struct RequestSettings {
    pub(crate) sampling: SamplingOptions,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) stops: Vec<String>,
    pub(crate) grammar: Option<Grammar>,
    pub(crate) hook: Option<Box<dyn SamplingHook>>,
    pub(crate) raw: bool,
    pub(crate) special: bool,
    pub(crate) system: Option<String>,
    pub(crate) template_variables: serde_json::Map<String, serde_json::Value>,
    pub(crate) reseed: bool,
    pub(crate) priority: i32,
    pub(crate) client: u64,
    pub(crate) salt: u64,
}

/// Reads the parameters of a request.
///
/// # Safety
/// The addresses in the parameters obey the rules of the header.
pub(crate) unsafe fn settings(params: &qd_request_params) -> Outcome<RequestSettings> {
    // SAFETY: the caller's promise.
    let (biases, stops, system, variables) = unsafe {
        (
            array(params.logit_biases, params.logit_bias_count, "logit_biases")?,
            array(params.stops, params.stop_count, "stops")?,
            optional_text(params.system, "system")?,
            optional_text(params.template_variables, "template_variables")?,
        )
    };
    let stop = |pointer: &*const c_char| {
        // SAFETY: the caller's promise.
        let stop = unsafe { text(*pointer, "a stop string") }?;
        if stop.is_empty() { Err(Failure::argument("a stop string is empty")) } else { Ok(stop.to_owned()) }
    };
    let template_variables = match variables {
        None => serde_json::Map::new(),
        Some(text) => serde_json::from_str(text).map_err(|error| {
            Failure::argument(format!("template_variables is not a JSON object: {error}"))
        })?,
    };
    Ok(RequestSettings {
        sampling: SamplingOptions {
            temperature: params.temperature,
            top_k: params.top_k as usize,
            top_p: params.top_p,
            min_p: params.min_p,
            typical_p: params.typical_p,
            top_n_sigma: params.top_n_sigma,
            xtc_probability: params.xtc_probability,
            xtc_threshold: params.xtc_threshold,
            repeat_penalty: params.repeat_penalty,
            repeat_last_n: params.repeat_last_n as usize,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            dry: DryOptions {
                multiplier: params.dry_multiplier,
                base: params.dry_base,
                allowed_length: params.dry_allowed_length as usize,
                last_n: params.dry_last_n as usize,
                ..DryOptions::default()
            },
            logit_bias: biases.iter().map(|bias| (bias.token, bias.bias)).collect(),
            ignore_eos: params.ignore_eos != 0,
            seed: params.seed,
        },
        max_tokens: (params.max_tokens != 0).then_some(params.max_tokens),
        stops: stops.iter().map(stop).collect::<Outcome<_>>()?,
        // SAFETY: the caller's promise.
        grammar: unsafe { grammar(params) }?,
        hook: params.logits_callback.map(|callback| {
            let hook: Box<dyn SamplingHook> =
                Box::new(LogitsHook { callback, data: UserData(params.logits_data) });
            hook
        }),
        raw: params.raw != 0,
        special: params.special != 0,
        system: system.map(str::to_owned),
        template_variables,
        reseed: params.reseed != 0,
        priority: params.priority,
        client: params.client,
        salt: params.salt,
    })
}

/// # Safety
/// As of [`settings`].
unsafe fn grammar(params: &qd_request_params) -> Outcome<Option<Grammar>> {
    // SAFETY: the caller's promise.
    let (schema, gbnf, lark, regex) = unsafe {
        (
            optional_text(params.json_schema, "json_schema")?,
            optional_text(params.grammar, "grammar")?,
            optional_text(params.lark, "lark")?,
            optional_text(params.regex, "regex")?,
        )
    };
    let schema = match schema {
        None => None,
        Some(schema) => Some(Grammar::JsonSchema(
            serde_json::from_str(schema)
                .map_err(|error| Failure::argument(format!("json_schema is not JSON: {error}")))?,
        )),
    };
    let owned = |make: fn(String) -> Grammar, text: Option<&str>| text.map(|text| make(text.to_owned()));
    let given =
        [schema, owned(Grammar::Gbnf, gbnf), owned(Grammar::Lark, lark), owned(Grammar::Regex, regex)];
    let mut given = given.into_iter().flatten();
    match (given.next(), given.next()) {
        (first, None) => Ok(first),
        _ => Err(Failure::argument("only one of json_schema, grammar, lark and regex can be given")),
    }
}

/// The messages of a conversation.
///
/// # Safety
/// The addresses obey the rules of the header.
pub(crate) unsafe fn messages(pointer: *const qd_message, count: usize) -> Outcome<Vec<Message>> {
    // SAFETY: the caller's promise.
    let messages = unsafe { array(pointer, count, "messages") }?;
    let read = |message: &qd_message| {
        // SAFETY: the caller's promise.
        let (role, content) = unsafe { (text(message.role, "a role")?, text(message.content, "a content")?) };
        Ok(Message::new(role, content))
    };
    messages.iter().map(read).collect()
}

/// The messages of a conversation in OpenAI's JSON.
///
/// # Safety
/// As of [`text`].
pub(crate) unsafe fn json_messages(pointer: *const c_char) -> Outcome<Vec<Message>> {
    // SAFETY: the caller's promise.
    let text = unsafe { text(pointer, "messages") }?;
    serde_json::from_str(text)
        .map_err(|error| Failure::argument(format!("messages is not a list of messages: {error}")))
}

/// A callback as a hook.
struct LogitsHook {
    callback: extern "C" fn(*mut c_void, *const u32, usize, *mut f32, usize) -> i32,
    data: UserData,
}

impl SamplingHook for LogitsHook {
    fn apply(&mut self, tokens: &[u32], logits: &mut [f32]) -> Result<(), HookError> {
        match (self.callback)(
            self.data.pointer(),
            tokens.as_ptr(),
            tokens.len(),
            logits.as_mut_ptr(),
            logits.len(),
        ) {
            0 => Ok(()),
            code => Err(format!("the callback for logits returned {code}").into()),
        }
    }
}

/// Writes a code and a message to an error: for callbacks that fail. NULL is ignored.
///
/// Threads: any; one at a time for each error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qd_error_set(error: Option<&mut qd_error>, code: i32, message: *const c_char) {
    crate::guard::value((), || {
        // SAFETY: the rules of the header for texts.
        let message = unsafe { optional_text(message, "message") }?;
        if let Some(error) = error {
            error.fill(code, message.unwrap_or_default());
        }
        Ok(())
    });
}
