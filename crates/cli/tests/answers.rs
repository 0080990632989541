//! Output of `quadriga run` and `quadriga chat`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use crate::common::{Fixture, output, output_with_input, quadriga};
use serde_json::Value;

#[test]
fn the_prompt_comes_from_an_argument_an_option_a_file_or_stdin() {
    let fixture = Fixture::new(&[]);
    let flags = ["--temp", "0", "-n", "8", "-q"];
    let by_argument = output(fixture.command("run", &flags).arg("good morning")).success();
    assert!(by_argument.out.trim().len() > 1 && by_argument.err.is_empty(), "{by_argument:?}");
    let by_option = output(fixture.command("run", &flags).args(["-p", "good morning"])).success();
    std::fs::write(fixture.path("prompt"), "good morning").unwrap();
    let by_file = output(fixture.command("run", &flags).arg("-f").arg(fixture.path("prompt"))).success();
    let by_input = output_with_input(&mut fixture.command("run", &flags), b"good morning").success();
    assert!([by_option.out, by_file.out, by_input.out].iter().all(|out| *out == by_argument.out));
}

#[test]
fn piped_text_follows_the_prompt_of_the_command_line() {
    let fixture = Fixture::new(&[]);
    let flags = ["--temp", "0", "-n", "8", "--json", "-q"];
    let run = |words: &[&str], input: &[u8]| -> Value {
        let output = output_with_input(fixture.command("run", &flags).args(words), input).success();
        serde_json::from_str(&output.out).unwrap()
    };
    let joined = run(&["Explain:"], b"good morning");
    let whole = run(&["Explain:\n\ngood morning"], b"");
    // The vocabulary has a token per byte.
    assert_eq!(joined["prompt"]["tokens"], "Explain:\n\ngood morning".len());
    assert_eq!(joined["text"], whole["text"]);
    // Options for the prompt ignore stdin; blank input adds nothing.
    assert_eq!(run(&["-p", "Explain:"], b"good morning")["prompt"]["tokens"], "Explain:".len());
    assert_eq!(run(&["Explain:"], b" \n")["prompt"]["tokens"], "Explain:".len());
    assert_eq!(run(&["-p", "-sys"], b"")["prompt"]["tokens"], "-sys".len());
}

#[test]
fn a_first_word_that_is_a_gguf_file_is_the_model() {
    let fixture = Fixture::new(&[]);
    let flags = ["--temp", "0", "-n", "8", "-q"];
    let by_option = output(fixture.command("run", &flags).arg("hi")).success();
    let by_word = output(quadriga(["run"]).arg(&fixture.model).arg("hi").args(flags)).success();
    assert_eq!(by_word.out, by_option.out);
    // With -m it is text; text with the name of a file is no file.
    let text = fixture.command("run", &flags).args(["tiny.gguf", "hi", "--json"]).output().unwrap();
    let text: Value = serde_json::from_slice(&text.stdout).unwrap();
    assert_eq!(text["prompt"]["tokens"], "tiny.gguf hi".len());
    output(&mut quadriga(["run", "missing.gguf", "hi"])).failed(1, &["missing.gguf", "No such file"]);
    let chat = output_with_input(quadriga(["chat"]).arg(&fixture.model).args(flags), b"hi\n").success();
    assert_eq!(chat.out, by_option.out);
    output(quadriga(["bench", "-p", "8", "-n", "0", "-r", "1"]).arg(&fixture.model)).success();
    output(quadriga(["plan"]).arg(&fixture.model)).success();
}

#[test]
fn options_of_llama_cpp_are_understood() {
    let fixture = Fixture::new(&["--heads", "2"]);
    let run = |flags: &[&str]| output(fixture.command("run", &["-q"]).args(flags).arg("hi")).success().out;
    let plain = run(&["-n", "8", "--temp", "0"]);
    for flags in [
        &["--n-predict", "8", "--temperature", "0"][..],
        &["-n", "8", "--temp", "0", "-s", "-1"],
        &["-n", "8", "--temp", "0", "-ngl", "-1"],
        &["-n", "8", "--temp", "0", "-ngl", "-2"],
        &["-n", "8", "--temp", "0", "--top-k", "-1"],
        &["-n", "8", "--temp", "0", "-st", "-no-cnv"],
        &["-fa", "-n", "8", "--temp", "0"],
        &["-n", "8", "--temp", "0", "-fa", "on"],
        &["-n", "8", "--temp", "0", "-ctk", "f16", "-ctv", "f16"],
        &[
            "-n",
            "8",
            "--temp",
            "0",
            "-ub",
            "1",
            "-tb",
            "1",
            "-cnv",
            "-e",
            "-v",
            "-dev",
            "none",
            "-r",
            "no such text",
        ],
        &["-n", "8", "--temp", "0", "--color", "--mlock", "--jinja", "--no-warmup", "--no-display-prompt"],
    ] {
        assert_eq!(run(flags), plain, "{flags:?}");
    }
    let prefix = plain.get(1..4).unwrap();
    let (stopped, reversed) =
        (run(&["-n", "8", "--temp", "0", "--stop", prefix]), run(&["-n", "8", "--temp", "0", "-r", prefix]));
    assert_eq!((&stopped, stopped.len() < plain.len()), (&reversed, true));
    let prompt_tokens = |flags: &[&str]| -> Value {
        let flags = [flags, &["-n", "1", "-q", "--json", "-p", r"a\nb\q"]].concat();
        let output = output(&mut fixture.command("run", &flags)).success();
        serde_json::from_str::<Value>(&output.out).unwrap()["prompt"]["tokens"].clone()
    };
    assert_eq!((prompt_tokens(&[]), prompt_tokens(&["--escape"])), (6.into(), 5.into()));
    let batch = output(&mut fixture.command("plan", &["-ub", "32", "-b", "64"])).success().out;
    assert!(batch.contains("a prompt batch of 32 tokens"), "{batch}");
    let cache = |flags: &[&str]| -> Value {
        let output = output(fixture.command("run", &["-n", "1", "--json"]).args(flags).arg("hi")).success();
        serde_json::from_str::<Value>(&output.out).unwrap()["backends"][0]["state"].clone()
    };
    assert_eq!(cache(&["-ctk", "q8_0", "-ctv", "q8_0"]), cache(&["--cache-type", "q8_0"]));
    assert_ne!(cache(&["-ctk", "q8_0", "-ctv", "q8_0"]), cache(&[]));
    for (flags, name) in [
        (&["-fa", "off"][..], "-fa off"),
        (&["-tb", "2"], "-tb"),
        (&["--conversation"], "-cnv"),
        (&["--mlock"], "--mlock"),
        (&["--color=auto"], "--color"),
        (&["--verbose"], "-v"),
    ] {
        let noted = output(fixture.command("run", &["-n", "1"]).args(flags).arg("hi")).success();
        let notes = noted.err.lines().filter(|line| line.contains("has no effect"));
        assert_eq!(notes.clone().count(), 1, "{noted:?}");
        assert!(notes.clone().all(|note| note.contains(&format!("quadriga: {name} has"))), "{noted:?}");
    }
}

#[test]
fn the_same_seed_gives_the_same_answer_with_any_number_of_threads() {
    let fixture = Fixture::new(&["--type", "f16"]);
    let run = |flags: &[&str]| {
        let mut command = fixture.command("run", &["-n", "12", "-q", "-s", "7", "a somewhat longer prompt"]);
        output(command.args(flags)).success().out
    };
    let plain = run(&[]);
    for flags in [&["-t", "1"][..], &["-t", "3"], &["-ngl", "0"], &["-ngl=0"]] {
        assert_eq!(run(flags), plain, "{flags:?}");
    }
}

#[test]
fn a_summary_of_speed_and_memory_goes_to_stderr() {
    let fixture = Fixture::new(&[]);
    let output = output(&mut fixture.command("run", &["hello", "-n", "4", "--temp", "0"])).success();
    for part in ["load", "prompt 5 tokens", "answer 4 tokens", "tok/s", "memory: cpu", "cache"] {
        assert!(output.err.contains(part), "{part}: {output:?}");
    }
}

/// The parts of the line about memory add up to its total.
#[test]
fn the_memory_of_a_device_adds_up() {
    let fixture = Fixture::new(&[]);
    let output = output(&mut fixture.command("run", &["hello", "-n", "1", "--temp", "0"])).success();
    let line = output.err.lines().find_map(|line| line.strip_prefix("memory: cpu ")).expect("a line");
    let bytes = |text: &str| {
        let mut words = text.split_whitespace();
        let number: f64 = words.next().unwrap().parse().unwrap();
        let unit = words.next().unwrap();
        let power = ["B", "KiB", "MiB", "GiB"].iter().position(|name| *name == unit).expect("a unit");
        let unit = 1024f64.powi(power as i32);
        (number * unit, 0.05 * unit)
    };
    let (total, parts) = line.split_once(')').unwrap().0.split_once(" (").unwrap();
    assert!(line.ends_with(" of weights in the mapped file"), "{line}");
    let part = |name: &str| {
        let text = parts.split(", ").find_map(|part| part.strip_prefix(name));
        bytes(text.unwrap_or_else(|| panic!("{name}: {line}")))
    };
    // Each number is rounded to a tenth of its unit.
    let (total, mut rounding) = bytes(total);
    let mut sum = 0.0;
    for (number, error) in ["weights ", "KV cache ", "compute "].map(part) {
        sum += number;
        rounding += error;
    }
    assert!((sum - total).abs() <= 1.001 * rounding, "{line}: {sum}");
}

#[test]
fn json_has_the_answer_speed_and_memory() {
    let fixture = Fixture::new(&[]);
    let flags = ["hello", "-n", "4", "--temp", "0", "--json", "-q", "-s", "9"];
    let object: Value =
        serde_json::from_str(&output(&mut fixture.command("run", &flags)).success().out).unwrap();
    assert_eq!(object["finish"], "length");
    let stop: String = object["text"].as_str().unwrap().chars().skip(1).take(1).collect();
    let stopped = output(fixture.command("run", &flags).args(["--stop", &stop])).success().out;
    let stopped: Value = serde_json::from_str(&stopped).unwrap();
    assert_eq!(stopped["finish"], "stop");
    assert_eq!((&object["answer"]["tokens"], &object["prompt"]["tokens"]), (&4.into(), &5.into()));
    assert_eq!(object["seed"], 9);
    assert_eq!(object["backends"][0]["backend"], "cpu");
}

#[test]
fn a_chat_answers_lines_and_has_commands() {
    let fixture = Fixture::new(&[]);
    let mut command = fixture.command("chat", &["-n", "5", "--temp", "0"]);
    let output = output_with_input(&mut command, b"hi\n\n/stats\n/reset\nhi\n/what\n/help\n").success();
    assert!(output.out.len() > 2, "{output:?}");
    for part in ["1 answer ·", "2 answers ·", "memory: cpu", "Unknown command /what", "/reset", "cleared"] {
        assert!(output.err.contains(part), "{part}: {output:?}");
    }
}

#[test]
fn a_full_context_ends_an_answer_with_a_warning() {
    let fixture = Fixture::new(&["--vocab", "300"]);
    let output = output(&mut fixture.command("run", &["hello", "-c", "16", "--temp", "0", "-q"])).success();
    assert!(output.err.contains("the context of 16 tokens is full"), "{output:?}");
    let flags = ["hello", "-c", "16", "--temp", "0", "-q", "--json"];
    let json = crate::common::output(&mut fixture.command("run", &flags)).success().out;
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["finish"], "context");
    // 5 tokens of the prompt and 11 of the answer fill the context; one more was sampled.
    assert_eq!((&json["prompt"]["tokens"], &json["answer"]["tokens"]), (&5.into(), &12.into()));
}

#[test]
fn the_context_is_what_the_model_was_trained_with() {
    let fixture = Fixture::new(&["--context", "20000"]);
    let context = |flags: &[&str]| {
        let plan = output(&mut fixture.command("plan", flags)).success();
        (plan.out.lines().next().unwrap().to_owned(), plan.err)
    };
    assert_eq!(context(&[]).0, "context 20000, KV cache F16, planned for a prompt batch of 512 tokens");
    assert_eq!(
        context(&["-c", "3000"]),
        ("context 3000, KV cache F16, planned for a prompt batch of 512 tokens".to_owned(), String::new())
    );
    let (first, warning) = context(&["-c", "30000"]);
    assert_eq!(first, "context 30000, KV cache F16, planned for a prompt batch of 512 tokens");
    assert!(
        warning.contains("-c 30000 is past the 20000 tokens that the model was trained with"),
        "{warning}"
    );
    assert_eq!(context(&["-c", "30000", "-q"]).1, "");
    let small = Fixture::new(&["--context", "16"]);
    let bench = output(&mut small.command("bench", &["-p", "24", "-n", "0", "-r", "1"])).success();
    assert!(bench.err.contains("a context of 24 tokens is past the 16 tokens that"), "{bench:?}");
    // A context that no machine holds is halved until it fits; the layers stay on the device of the default.
    let long = Fixture::new(&["--context", "1000000000"]);
    let plan = output(&mut long.command("plan", &["-b", "8"])).success().out;
    let chosen: u64 = plan.split([' ', ',']).nth(1).unwrap().parse().unwrap();
    assert!((4096..1_000_000_000).contains(&chosen), "{plan}");
    let budget = output(&mut fixture.command("plan", &["--device", "sim", "--vram-budget", "5M"])).success();
    assert!(budget.out.starts_with("context 5000,"), "{budget:?}");
}

#[test]
fn counts_of_one_are_singular() {
    let fixture = Fixture::new(&[]);
    let output = output(&mut fixture.command("run", &["h", "-n", "1", "--temp", "0"])).success();
    assert!(output.err.contains("prompt 1 token,") && output.err.contains("answer 1 token,"), "{output:?}");
}

#[test]
fn options_are_grouped_and_defaults_are_in_brackets() {
    let help = output(&mut quadriga(["run", "--help"])).success().out;
    for part in ["Model options:", "Sampling options:", "Device options:", "Profiling options:"] {
        assert!(help.contains(part), "{part}: {help}");
    }
    for part in [
        "temperature, 0 for greedy decoding [default: 0.8]",
        "Random seed, -1 for a random one [default: random]",
    ] {
        assert!(help.contains(part), "{part}: {help}");
    }
}

#[test]
fn help_has_a_short_line_for_each_command() {
    let help = output(&mut quadriga(["help"])).success().out;
    assert!(help.lines().count() <= 40 && help.lines().all(|line| line.chars().count() <= 80), "{help}");
    for word in ["run", "chat", "bench", "plan", "inspect", "devices", "eval", "check", "synth", "130"] {
        assert!(help.contains(word), "{word}: {help}");
    }
}

#[test]
fn sampling_options_reach_the_sampler() {
    let fixture = Fixture::new(&[]);
    let run = |flags: &[&str]| -> Value {
        let command = &mut fixture.command("run", &["hello", "-n", "12", "--temp", "0", "--json", "-q"]);
        let output = output(command.args(["--logit-bias", "97+20"]).args(flags)).success();
        serde_json::from_str(&output.out).unwrap()
    };
    let plain = run(&[]);
    assert_eq!(plain["text"], "aaaaaaaaaaaa", "token 97 is this letter");
    for flags in [
        &["--typical", "1"][..],
        &["--top-n-sigma", "-1"],
        &["--xtc-probability", "0", "--xtc-threshold", "0.2"],
        &["--repeat-last-n", "0", "--repeat-penalty", "2"],
        &[
            "--dry-multiplier",
            "0",
            "--dry-base",
            "2",
            "--dry-allowed-length",
            "3",
            "--dry-penalty-last-n",
            "9",
        ],
        &["--logit-bias", "17+0"],
    ] {
        assert_eq!(run(flags)["text"], plain["text"], "{flags:?}");
    }
    for flags in [
        &["--repeat-penalty", "1000", "--repeat-last-n", "-1"][..],
        &["--presence-penalty", "90"],
        &["--frequency-penalty", "90"],
        &["--dry-multiplier", "900", "--dry-allowed-length", "1", "--dry-sequence-breaker", "none"],
        &["--xtc-probability", "1", "--xtc-threshold", "0", "--min-p", "0", "--top-p", "1"],
        &["--logit-bias", "97-20"],
        &["-l", "97-inf"],
    ] {
        assert_ne!(run(flags)["text"], plain["text"], "{flags:?}");
    }
    for (flags, part) in [
        (&["--logit-bias", "17"][..], "--logit-bias"),
        (&["--repeat-last-n", "-2"], "--repeat-last-n"),
        (&["--dry-multiplier", "-1"], "--dry-multiplier"),
        (&["--xtc-threshold", "2"], "--xtc-threshold"),
    ] {
        let failed = output(fixture.command("run", &["hello"]).args(flags)).failed_usage();
        assert!(failed.err.contains(part), "{failed:?}");
    }
    output(&mut fixture.command("run", &["hello", "--logit-bias", "99999+1"])).failed(2, &["token 99999"]);
}

#[test]
fn an_ignored_end_token_does_not_end_the_answer() {
    let fixture = Fixture::new(&[]);
    let run = |flags: &[&str]| -> Value {
        let command = &mut fixture.command("run", &["hello", "-n", "6", "--temp", "0", "--json", "-q"]);
        serde_json::from_str(&output(command.args(flags)).success().out).unwrap()
    };
    let bias = "256+1000"; // the end-of-text token of a synthetic model
    assert_eq!(run(&["-l", bias])["finish"], "stop");
    assert_eq!(run(&["-l", bias, "--ignore-eos"])["finish"], "length");
}

#[test]
fn the_speed_of_one_token_is_not_measurable() {
    let fixture = Fixture::new(&[]);
    let one = output(&mut fixture.command("run", &["hello", "-n", "1", "--temp", "0"])).success();
    assert!(one.err.contains("answer 1 token, - tok/s"), "{one:?}");
    let json =
        output(&mut fixture.command("run", &["hello", "-n", "1", "--temp", "0", "--json", "-q"])).success();
    assert!(serde_json::from_str::<Value>(&json.out).unwrap()["answer"]["tok_s"].is_null(), "{json:?}");
    let chat =
        output_with_input(&mut fixture.command("chat", &["-n", "1", "--temp", "0"]), b"hi\n").success();
    assert!(chat.err.contains("generation 1 token, - tok/s"), "{chat:?}");
}

#[test]
fn a_prompt_cache_saves_computing_the_common_prefix() {
    let fixture = Fixture::new(&[]);
    let file = fixture.path("prompt.cache");
    let run = |prompt: &str, flags: &[&str]| -> Value {
        let mut command = fixture.command("run", &["-n", "6", "--temp", "0", "--json", "-q", "-p", prompt]);
        let output = output(command.arg("--prompt-cache").arg(&file).args(flags)).success();
        serde_json::from_str(&output.out).unwrap()
    };
    let plain = |prompt: &str| -> Value {
        let output =
            output(&mut fixture.command("run", &["-n", "6", "--temp", "0", "--json", "-q", "-p", prompt]));
        serde_json::from_str(&output.success().out).unwrap()
    };
    let prompt = |value: &Value| (value["prompt"]["tokens"].clone(), value["prompt"]["cached"].clone());
    let counts = |computed: usize, cached: usize| (Value::from(computed), Value::from(cached));
    // The vocabulary has a token per byte.
    let first = run("good morning", &[]);
    assert_eq!((prompt(&first), &first["text"]), (counts(12, 0), &plain("good morning")["text"]));
    let size = std::fs::metadata(&file).unwrap().len();
    for (text, cached) in
        [("good morning", 11), ("good evening", 5), ("good morning and more", 12), ("good", 3), ("bad", 0)]
    {
        let again = run(text, &["--prompt-cache-ro"]);
        assert_eq!(prompt(&again), counts(text.len() - cached, cached), "{text}");
        // Batches of other sizes round differently, so that an answer after a partly cached prompt may be another one
        // than after a prompt that was computed whole. The same cache gives the same answer.
        let expected = if cached == 0 { plain(text) } else { run(text, &["--prompt-cache-ro"]) };
        assert_eq!(again["text"], expected["text"], "{text}");
    }
    assert_eq!(std::fs::metadata(&file).unwrap().len(), size, "read only");
    run("good morning, all", &[]);
    assert!(std::fs::metadata(&file).unwrap().len() > size, "updated");
    // With the answer in the cache, a prompt that continues it computes only what is new. The answer is forced to be a text
    // whose tokens are the same when it is tokenized again.
    let model = quadriga_gguf::File::read(&fixture.model).unwrap();
    let tokens: Vec<&str> = model.get("tokenizer.ggml.tokens").unwrap();
    let bias = format!("{}+1000", tokens.iter().position(|token| *token == "a").expect("a token for a"));
    let whole = run("good morning, all", &["--prompt-cache-all", "--logit-bias", &bias]);
    assert_eq!(whole["text"], "aaaaaa");
    let longer = "good morning, allaaaaaa";
    assert_eq!(prompt(&run(longer, &[])).1, longer.len() - 1);
    let mut command = fixture.command("run", &["-n", "2", "--temp", "0", "-p", "good morning"]);
    let summary = output(command.arg("--prompt-cache").arg(&file)).success();
    assert!(summary.err.contains("prompt 1 token (and 11 from the prompt cache)"), "{summary:?}");
    // A chat uses and keeps it, too.
    let mut command = fixture.command("chat", &["-n", "4", "--temp", "0"]);
    let chat = output_with_input(command.arg("--prompt-cache").arg(&file), b"good morning\n").success();
    assert!(chat.err.contains("prompt 1 token,"), "{chat:?}");
}

#[test]
fn a_prompt_cache_of_another_model_or_no_prompt_cache_is_an_error() {
    let fixture = Fixture::new(&[]);
    let other = Fixture::new(&["--seed", "9"]);
    let file = fixture.path("prompt.cache");
    let run = |fixture: &Fixture, flags: &[&str]| {
        let mut command = fixture.command("run", &["-n", "2", "--temp", "0", "-q", "-p", "hi"]);
        output(command.arg("--prompt-cache").arg(&file).args(flags))
    };
    run(&fixture, &[]).success();
    run(&other, &[]).failed(1, &["prompt.cache", "another model", "delete the file"]);
    run(&fixture, &["--cache-type", "f32"]).failed(1, &["prompt.cache", "F16", "F32"]);
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    run(&fixture, &[]).failed(1, &["prompt.cache", "incomplete"]);
    std::fs::write(&file, "something else").unwrap();
    run(&fixture, &[]).failed(1, &["prompt.cache", "not a saved KV cache"]);
    assert_eq!(std::fs::read(&file).unwrap(), b"something else", "it is not overwritten");
    std::fs::write(&file, "").unwrap();
    run(&fixture, &[]).success();
    assert_eq!(std::fs::read(&file).unwrap(), bytes, "an empty file is filled");
    output(&mut fixture.command("run", &["hi", "--prompt-cache-all"])).failed_usage();
}

/// An error names the file, not a temporary one, before anything is computed.
#[test]
fn a_prompt_cache_that_cannot_be_written_is_an_error_at_once() {
    let fixture = Fixture::new(&[]);
    let file = fixture.path("no/such/folder/prompt.cache");
    for command in ["run", "chat"] {
        let mut command = fixture.command(command, &["-n", "4", "-p", "hi"]);
        let failed = output(command.arg("--prompt-cache").arg(&file));
        let failed = failed.failed(1, &["no/such/folder/prompt.cache", "No such file"]);
        assert!(!failed.err.contains(".quadriga-"), "{failed:?}");
    }
    // It is not written.
    let mut command = fixture.command("run", &["-n", "4", "-q", "-p", "hi", "--prompt-cache-ro"]);
    output(command.arg("--prompt-cache").arg(&file)).success();
}
