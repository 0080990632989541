//! The document of described routes.

use serde_json::{Map, Value, json};

use super::schema::{answer, integer, nullable, one_of, text};
use super::{Answer, Described, Group};

/// The document of routes that are below a prefix.
pub(super) fn document(
    described: &[Described],
    prefix: &str,
    error_schema: fn(&str) -> &'static str,
) -> Value {
    let mut paths: Map<String, Value> = Map::new();
    for route in described {
        let path = paths.entry(route.path.replace("{*", "{")).or_insert_with(|| json!({}));
        if let Some(path) = path.as_object_mut() {
            path.insert(route.method.to_owned(), operation(route, error_schema(route.path)));
        }
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Quadriga",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Language models with the interfaces of OpenAI, Anthropic, Ollama and llama-server. \
                            Unknown fields of requests are ignored, and null is the same as no field.",
        },
        "servers": [{ "url": if prefix.is_empty() { "/" } else { prefix } }],
        "security": [{}, { "bearer": [] }, { "key": [] }],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": { "type": "http", "scheme": "bearer" },
                "key": { "type": "apiKey", "in": "header", "name": "x-api-key" },
            },
            "schemas": {
                "OpenAiError": openai_error(),
                "AnthropicError": anthropic_error(),
                "OllamaError": answer(json!({ "error": text() })),
                "LlamaServerError": answer(json!({
                    "error": answer(json!({ "code": integer(), "message": text(), "type": text() })),
                })),
            },
        },
    })
}

fn openai_error() -> Value {
    let body = json!({
        "message": text(),
        "type": text(),
        "param": nullable(&text()),
        "code": nullable(&text()),
    });
    answer(json!({ "error": answer(body) }))
}

fn anthropic_error() -> Value {
    answer(json!({
        "type": one_of(&["error"]),
        "error": answer(json!({ "type": text(), "message": text() })),
        "request_id": nullable(&text()),
    }))
}

fn operation(route: &Described, error_schema: &str) -> Value {
    let Described { operation, alias, .. } = route;
    let id = match alias {
        0 => operation.id.to_owned(),
        number => format!("{}_{number}", operation.id),
    };
    let mut object = json!({
        "operationId": id,
        "summary": operation.summary,
        "tags": [tag(operation.group)],
        "responses": responses(operation.answer, error_schema, operation.request.is_some()),
    });
    if let Some(object) = object.as_object_mut() {
        let parameters = parameters(route.path);
        if !parameters.is_empty() {
            object.insert("parameters".to_owned(), parameters.into());
        }
        if let Some(schema) = operation.request {
            let schema = schema();
            let is_list = schema.get("type").is_some_and(|kind| kind == "array");
            let required = is_list
                || schema.get("required").and_then(Value::as_array).is_some_and(|all| !all.is_empty());
            let body =
                json!({ "required": required, "content": { "application/json": { "schema": schema } } });
            object.insert("requestBody".to_owned(), body);
        }
    }
    object
}

/// The parameters of a path's query, and what they mean.
fn query(path: &str) -> &'static [(&'static str, &'static str)] {
    const MODEL: (&str, &str) = ("model", "The model, where several are served");
    match path {
        "/props" | "/tokenizer_info" | "/plan" | "/plan.svg" => &[MODEL],
        "/slots" => &[MODEL, ("fail_on_no_slot", "1 for status 503 where no slot is free")],
        _ => &[],
    }
}

/// The parameters that are a part of a path, and those of its query.
fn parameters(path: &str) -> Vec<Value> {
    let names = path.split('{').skip(1).filter_map(|rest| rest.split('}').next());
    names
        .map(|name| {
            let name = name.trim_start_matches('*');
            json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string", "minLength": 1 } })
        })
        .chain(query(path).iter().map(|(name, description)| {
            json!({ "name": name, "in": "query", "required": false, "description": description, "schema": text() })
        }))
        .collect()
}

fn responses(answer: Answer, error_schema: &str, has_body: bool) -> Value {
    let content = match answer {
        Answer::Json(schema) => json!({ "application/json": { "schema": schema() } }),
        Answer::JsonOrEvents(schema) => json!({
            "application/json": { "schema": schema() },
            // Events, which schemas of this version cannot describe.
            "text/event-stream": {},
        }),
        Answer::JsonLines(schema) => json!({
            "application/json": { "schema": schema() },
            "application/x-ndjson": { "schema": text() },
        }),
        Answer::Text(media) => json!({ media: { "schema": text() } }),
    };
    let mut all = Map::new();
    all.insert("200".to_owned(), json!({ "description": "The answer", "content": content }));
    let general = [
        ("400", "A field or a part of the path is wrong; the message names it"),
        ("401", "The key is missing or unknown"),
        ("403", "The server may not be asked under this name, or by a page of this origin"),
        ("404", "There is no such model or route"),
    ];
    let server = [
        ("405", "The route has another method"),
        ("500", "It failed through no fault of the caller's"),
        ("501", "It is known, but this server or model does not support it"),
        ("503", "The server is starting, stopping, or out of memory"),
    ];
    let of_body = [
        ("408", "The body did not arrive in time"),
        ("413", "The body is too large"),
        ("429", "A limit of the key is reached, or too many requests wait"),
    ];
    let schema = json!({ "$ref": format!("#/components/schemas/{error_schema}") });
    for (status, description) in
        general.iter().chain(&server).chain(if has_body { &of_body[..] } else { &[] })
    {
        let error = json!({
            "description": description,
            "content": { "application/json": { "schema": schema } },
        });
        all.insert((*status).to_owned(), error);
    }
    all.into()
}

fn tag(group: Group) -> &'static str {
    match group {
        Group::OpenAi => "OpenAI",
        Group::Anthropic => "Anthropic",
        Group::Ollama => "Ollama",
        Group::LlamaServer => "llama-server",
        Group::Server => "Server",
    }
}
