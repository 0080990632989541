//! Answers as callers get them.

use std::ffi::{CString, c_char, c_void};

use quadriga::llm::tools::ToolCallPiece;
use quadriga::llm::{Completion, Finish, TextPiece};

use crate::arguments::c_text;

/// A token of an answer, and the text that it completes. Texts end with NUL, and are empty while a character or a possible
/// stop string is incomplete.
#[repr(C)]
pub struct qd_piece {
    /// The token.
    pub token: u32,
    /// A part of the answer.
    pub text: *const c_char,
    /// A part of the model's reasoning, which is not part of its answer.
    pub reasoning: *const c_char,
    /// Parts of calls of tools as a JSON list, or NULL: {"index", "name" in the first part, "arguments"}.
    pub tool_calls: *const c_char,
}

/// Is given an answer as it is generated. 0 to go on, anything else to stop.
pub type qd_piece_callback = Option<extern "C" fn(user_data: *mut c_void, piece: *const qd_piece) -> i32>;

/// The model generated an end-of-generation token.
pub const QD_FINISH_END: i32 = 0;
/// A stop string was found.
pub const QD_FINISH_STOP: i32 = 1;
/// The answer has as many tokens as were asked for.
pub const QD_FINISH_LENGTH: i32 = 2;
/// The context is full.
pub const QD_FINISH_CONTEXT: i32 = 3;
/// It was cancelled, or stopped by its callback.
pub const QD_FINISH_CANCELLED: i32 = 4;

/// How an answer ended.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct qd_completion {
    /// Why: QD_FINISH_….
    pub finish: i32,
    /// With QD_FINISH_STOP, which stop string.
    pub stop: usize,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of those, the ones that were in the KV cache.
    pub cached_tokens: usize,
    /// Generated tokens.
    pub answer_tokens: usize,
    /// Of those, the ones of reasoning.
    pub reasoning_tokens: usize,
    /// Seconds of the prefill.
    pub prompt_seconds: f64,
    /// Seconds from the first generated token to the last.
    pub decode_seconds: f64,
}

/// The code of a reason, and the number of a stop string.
pub(crate) fn finish_code(finish: Finish) -> (i32, usize) {
    match finish {
        // Requests of this library have no stop tokens.
        Finish::End | Finish::StopToken(_) => (QD_FINISH_END, 0),
        Finish::Stop(number) => (QD_FINISH_STOP, number),
        Finish::Length => (QD_FINISH_LENGTH, 0),
        Finish::Context => (QD_FINISH_CONTEXT, 0),
        Finish::Cancelled => (QD_FINISH_CANCELLED, 0),
    }
}

/// The texts of a piece, with NUL at their ends.
pub(crate) struct PieceTexts {
    token: u32,
    text: CString,
    reasoning: CString,
    tool_calls: Option<CString>,
}

impl PieceTexts {
    pub(crate) fn new(piece: &TextPiece) -> PieceTexts {
        PieceTexts {
            token: piece.token,
            text: c_text(&piece.text),
            reasoning: c_text(&piece.reasoning),
            tool_calls: calls_json(&piece.tool_calls).map(|json| c_text(&json)),
        }
    }

    /// The piece, valid as long as this.
    pub(crate) fn piece(&self) -> qd_piece {
        qd_piece {
            token: self.token,
            text: self.text.as_ptr(),
            reasoning: self.reasoning.as_ptr(),
            tool_calls: self.tool_calls.as_ref().map_or(std::ptr::null(), |calls| calls.as_ptr()),
        }
    }
}

/// Calls a callback with a piece; whether it wants to go on.
pub(crate) fn show(piece: &TextPiece, callback: qd_piece_callback, data: *mut c_void) -> bool {
    let Some(callback) = callback else { return true };
    let texts = PieceTexts::new(piece);
    let piece = texts.piece();
    callback(data, &raw const piece) == 0
}

/// A finished answer.
pub(crate) fn described(completed: &Completion) -> qd_completion {
    let (finish, stop) = finish_code(completed.finish);
    qd_completion {
        finish,
        stop,
        prompt_tokens: completed.counts.prompt,
        cached_tokens: completed.counts.cached,
        answer_tokens: completed.counts.answer,
        reasoning_tokens: completed.counts.reasoning,
        prompt_seconds: completed.prompt_time.as_secs_f64(),
        decode_seconds: completed.decode_time.as_secs_f64(),
    }
}

/// Parts of calls as JSON; `None` if there are none.
fn calls_json(calls: &[ToolCallPiece]) -> Option<String> {
    let call = |piece: &ToolCallPiece| {
        let mut object = serde_json::Map::new();
        object.insert("index".to_owned(), piece.index.into());
        if let Some(name) = &piece.name {
            object.insert("name".to_owned(), name.as_str().into());
        }
        object.insert("arguments".to_owned(), piece.arguments.as_str().into());
        serde_json::Value::Object(object)
    };
    let list: Vec<serde_json::Value> = calls.iter().map(call).collect();
    if list.is_empty() { None } else { Some(serde_json::Value::Array(list).to_string()) }
}
