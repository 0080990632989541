//! Reads the vocabulary of a GGUF file.

use quadriga_gguf::File;

use super::{TokenType, Tokenizer, Vocabulary};
use crate::{Error, Result};

impl Vocabulary {
    /// Reads the `tokenizer.ggml.*` values of a file.
    pub fn from_file(file: &File) -> Result<Vocabulary> {
        let model: Option<&str> = file.find("tokenizer.ggml.model")?;
        let Some(model) = model.filter(|&model| model != "no_vocab" && model != "none") else {
            return Err(Error::NoVocabulary);
        };
        let tokens: Vec<&str> = file.get("tokenizer.ggml.tokens")?;
        let merges: Option<Vec<&str>> = file.find("tokenizer.ggml.merges")?;
        let types: Option<Vec<i64>> = file.find("tokenizer.ggml.token_type")?;
        let special = |name: &str, usual: Option<u32>| -> Result<Option<u32>> {
            let key = format!("tokenizer.ggml.{name}_token_id");
            let named: Option<i64> = file.find(&key)?;
            // Some files say "none" with -1 or u32::MAX; other values out of range are rejected by `Vocabulary::check`.
            let none = |id: &i64| *id == -1 || *id == i64::from(u32::MAX);
            match named {
                Some(id) if none(&id) => Ok(None),
                Some(id) => Ok(Some(u32::try_from(id).unwrap_or(u32::MAX))),
                None => Ok(usual.filter(|&token| (token as usize) < tokens.len())),
            }
        };
        // The defaults of each tokenizer model.
        let (bos, eos, unknown, separator) = match model {
            "llama" => (Some(1), Some(2), Some(0), None),
            "t5" => (None, Some(1), Some(2), None),
            "bert" => (Some(101), None, Some(100), Some(102)),
            _ => (None, None, None, None),
        };
        Ok(Vocabulary {
            pre: file.find::<&str>("tokenizer.ggml.pre")?.map(str::to_owned),
            scores: file.find("tokenizer.ggml.scores")?.unwrap_or_default(),
            types: types.unwrap_or_default().into_iter().map(TokenType::from_id).collect(),
            merges: owned(&merges.unwrap_or_default()),
            bos: special("bos", bos)?,
            eos: special("eos", eos)?,
            eot: special("eot", None)?,
            eom: special("eom", None)?,
            unknown: special("unknown", unknown)?,
            // The key is spelled like this.
            separator: special("seperator", separator)?,
            add_bos: file.find("tokenizer.ggml.add_bos_token")?,
            add_eos: file.find("tokenizer.ggml.add_eos_token")?,
            add_separator: file.find("tokenizer.ggml.add_sep_token")?,
            strip_after_special: is_phi3(file),
            add_space_prefix: file.find("tokenizer.ggml.add_space_prefix")?,
            remove_extra_spaces: file.find("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(false),
            lowercase: file.find("tokenizer.ggml.normalizer.lowercase")?,
            strip_accents: file.find("tokenizer.ggml.normalizer.strip_accents")?,
            replacements: replacements(file)?,
            model: model.to_owned(),
            tokens: owned(&tokens),
        })
    }
}

impl Tokenizer {
    /// The tokenizer of a GGUF file.
    pub fn from_file(file: &File) -> Result<Tokenizer> {
        Tokenizer::new(Vocabulary::from_file(file)?)
    }
}

/// Whether the model's name is that of a Phi-3. Files do not have the property of its tokens that tells.
fn is_phi3(file: &File) -> bool {
    let name = file.find::<&str>("general.name").ok().flatten().unwrap_or_default().to_lowercase();
    ["phi-3", "phi3"].iter().any(|known| name.contains(known))
}

fn owned(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|&text| text.to_owned()).collect()
}

/// SentencePiece's compiled normalization table, stored as signed or unsigned bytes.
fn replacements(file: &File) -> Result<Vec<u8>> {
    let key = "tokenizer.ggml.precompiled_charsmap";
    if let Ok(bytes) = file.find::<Vec<i8>>(key) {
        return Ok(bytes.unwrap_or_default().into_iter().map(i8::cast_unsigned).collect());
    }
    Ok(file.find::<Vec<u8>>(key)?.unwrap_or_default())
}
