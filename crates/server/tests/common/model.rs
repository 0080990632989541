//! A small random model with a vocabulary of single letters.

use quadriga_conformance::Rng;
use quadriga_gguf::{File, Writer};
use quadriga_graph::DType;
use quadriga_llm::Model;

const WIDTH: usize = 64;
const HEAD: usize = 16;
const FEED_FORWARD: usize = 96;
const LAYERS: usize = 2;

/// A template with tools, reasoning that can be turned off, and messages of all roles.
pub const TEMPLATE: &str = "{% if tools %}<|start|>tools{% for t in tools %} {{ t.function.name }}{% endfor %}<|end|>{% endif %}\
    {% for m in messages %}<|start|>{{ m.role }} {{ m.content }}\
    {% for c in m.tool_calls or [] %} call {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}\
    {% if add_generation_prompt %}<|start|>assistant {% endif %}";

/// The model.
pub fn small() -> Model {
    with_template(TEMPLATE)
}

/// The model with another chat template.
pub fn with_template(template: &str) -> Model {
    Model::from_file(File::from_bytes(bytes(template)).unwrap()).unwrap()
}

/// The model with another chat template and further control tokens, the last of which ends answers.
pub fn with_control(template: &str, control: &[&str]) -> Model {
    Model::from_file(File::from_bytes(bytes_with(template, control)).unwrap()).unwrap()
}

/// The number of `<|start|>`.
pub const START: u32 = 96;

/// The model with tokens for a gap in a text.
pub fn with_fill_tokens() -> Model {
    with_control(TEMPLATE, &["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])
}

/// The bytes of its file.
pub fn bytes(template: &str) -> Vec<u8> {
    bytes_with(template, &[])
}

/// The model whose BOS token is the one that begins each message of its template, as in ChatML models.
pub fn with_turn_marks_as_bos() -> Model {
    let mut writer = Writer::new();
    writer.set("tokenizer.ggml.bos_token_id", START).unwrap();
    Model::from_file(File::from_bytes(written(writer, TEMPLATE, &[])).unwrap()).unwrap()
}

fn bytes_with(template: &str, control: &[&str]) -> Vec<u8> {
    written(Writer::new(), template, control)
}

/// The model whose answer to a prompt with a line break at its end is this text, a token for each part, none of which may come twice.
pub fn answering(template: &str, parts: &[&str]) -> Model {
    let mut tokens = letters();
    let before = tokens.iter().position(|token| token == LINE_BREAK).unwrap();
    let first = tokens.len();
    tokens.extend(parts.iter().map(|part| part.replace(' ', "Ġ").replace('\n', LINE_BREAK)));
    let end = tokens.iter().position(|token| token == "<|end|>").unwrap();
    let chain: Vec<usize> = [before].into_iter().chain(first..tokens.len()).chain([end]).collect();
    let mut rng = Rng::new(5);
    let mut embedding = Vec::new();
    // Only the vector of the token before is left, whose product is the largest with itself.
    let weights = move |name: &str, rows: usize, cols: usize| -> Vec<f32> {
        match name {
            "token_embd.weight" => {
                embedding = (0..rows * cols).map(|_| rng.uniform(-1.0, 1.0) as f32).collect();
                embedding.clone()
            }
            "output.weight" => {
                let mut output = vec![0.0; rows * cols];
                for pair in chain.windows(2) {
                    let vector = &embedding[pair[0] * cols..(pair[0] + 1) * cols];
                    output[pair[1] * cols..(pair[1] + 1) * cols].copy_from_slice(vector);
                }
                output
            }
            _ => vec![0.0; rows * cols],
        }
    };
    let bytes = file(Writer::new(), template, tokens, &[], weights);
    Model::from_file(File::from_bytes(bytes).unwrap()).unwrap()
}

/// A line break as vocabularies of bytes write it.
const LINE_BREAK: &str = "Ċ";

fn letters() -> Vec<String> {
    let mut tokens: Vec<String> = ('!'..='~').map(String::from).collect();
    tokens.extend(["Ġ", LINE_BREAK, "<|start|>", "<|end|>", "the", "Ġthe"].map(String::from));
    tokens
}

fn written(writer: Writer<'_>, template: &str, control: &[&str]) -> Vec<u8> {
    let mut tokens = letters();
    tokens.extend(control.iter().map(|token| (*token).to_owned()));
    let mut rng = Rng::new(5);
    let weights = move |_: &str, rows: usize, cols: usize| -> Vec<f32> {
        let limit = (3.0 / cols as f64).sqrt();
        (0..rows * cols).map(|_| rng.uniform(-limit, limit) as f32).collect()
    };
    file(writer, template, tokens, control, weights)
}

/// A file with the matrices that are asked for by name, rows and columns.
fn file(
    mut writer: Writer<'_>,
    template: &str,
    tokens: Vec<String>,
    control: &[&str],
    mut weights: impl FnMut(&str, usize, usize) -> Vec<f32>,
) -> Vec<u8> {
    let is_control = |token: &String| token.starts_with("<|") || control.contains(&token.as_str());
    let types: Vec<i32> = tokens.iter().map(|token| if is_control(token) { 3 } else { 1 }).collect();
    let end = control.last().copied().unwrap_or("<|end|>");
    let end = tokens.iter().position(|token| token == end).unwrap() as u32;
    let texts: Vec<&str> = tokens.iter().map(String::as_str).collect();
    writer.set("general.architecture", "llama").unwrap();
    let numbers = [
        ("block_count", LAYERS),
        ("context_length", 4096),
        ("embedding_length", WIDTH),
        ("feed_forward_length", FEED_FORWARD),
        ("attention.head_count", WIDTH / HEAD),
        ("attention.head_count_kv", 2),
        ("rope.dimension_count", HEAD),
    ];
    for (name, number) in numbers {
        writer.set(&format!("llama.{name}"), number as u32).unwrap();
    }
    writer.set("llama.attention.layer_norm_rms_epsilon", 1e-5f32).unwrap();
    writer.set("tokenizer.ggml.model", "gpt2").unwrap();
    writer.set("tokenizer.ggml.pre", "gpt-2").unwrap();
    writer.set("tokenizer.ggml.tokens", texts).unwrap();
    writer.set("tokenizer.ggml.token_type", types).unwrap();
    writer.set("tokenizer.ggml.merges", vec!["t h", "th e", "Ġ the"]).unwrap();
    writer.set("tokenizer.ggml.eos_token_id", end).unwrap();
    writer.set("tokenizer.chat_template", template).unwrap();
    let mut matrix = |writer: &mut Writer<'_>, name: &str, rows: usize, cols: usize| {
        let bytes: Vec<u8> = weights(name, rows, cols).iter().flat_map(|value| value.to_le_bytes()).collect();
        writer.tensor(name, DType::F32, [rows, cols], move |out| out.write_all(&bytes)).unwrap();
    };
    let vector = |writer: &mut Writer<'_>, name: &str| {
        let bytes: Vec<u8> = [1f32; WIDTH].iter().flat_map(|value| value.to_le_bytes()).collect();
        writer.tensor(name, DType::F32, [WIDTH], move |out| out.write_all(&bytes)).map(drop).unwrap();
    };
    matrix(&mut writer, "token_embd.weight", tokens.len(), WIDTH);
    for layer in 0..LAYERS {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        vector(&mut writer, &name("attn_norm"));
        vector(&mut writer, &name("ffn_norm"));
        matrix(&mut writer, &name("attn_q"), WIDTH, WIDTH);
        matrix(&mut writer, &name("attn_k"), 2 * HEAD, WIDTH);
        matrix(&mut writer, &name("attn_v"), 2 * HEAD, WIDTH);
        matrix(&mut writer, &name("attn_output"), WIDTH, WIDTH);
        matrix(&mut writer, &name("ffn_gate"), FEED_FORWARD, WIDTH);
        matrix(&mut writer, &name("ffn_up"), FEED_FORWARD, WIDTH);
        matrix(&mut writer, &name("ffn_down"), WIDTH, FEED_FORWARD);
    }
    vector(&mut writer, "output_norm.weight");
    matrix(&mut writer, "output.weight", tokens.len(), WIDTH);
    let mut out = Vec::new();
    writer.write_to(&mut out).unwrap();
    out
}
