//! Values a function could return instead of what it computes, by its return type.

use syn::{GenericArgument, PathArguments, ReturnType, Type};

/// Replacement values for a function body, as source text.
pub fn replacements(output: &ReturnType) -> Vec<String> {
    match output {
        ReturnType::Default => vec!["()".into()],
        ReturnType::Type(_, kind) => values(kind),
    }
}

fn values(kind: &Type) -> Vec<String> {
    match kind {
        Type::Path(path) => path_values(path),
        Type::Tuple(tuple) if tuple.elems.is_empty() => vec!["()".into()],
        Type::Tuple(tuple) => {
            let mut rows = vec![Vec::new()];
            for element in &tuple.elems {
                let choices = values(element);
                rows = rows
                    .iter()
                    .flat_map(|row| {
                        choices.iter().map(|value| [row.as_slice(), std::slice::from_ref(value)].concat())
                    })
                    .collect();
            }
            rows.into_iter().take(8).map(|row| format!("({},)", row.join(", "))).collect()
        }
        Type::Reference(reference) => match &*reference.elem {
            Type::Path(path) if path.path.is_ident("str") && reference.mutability.is_none() => {
                texts(&["\"\"", "\"xyzzy\""])
            }
            Type::Slice(slice) => {
                let mut all = vec!["Vec::leak(Vec::new())".to_string()];
                all.extend(values(&slice.elem).iter().map(|value| format!("Vec::leak(vec![{value}])")));
                all
            }
            inner => values(inner).iter().map(|value| format!("Box::leak(Box::new({value}))")).collect(),
        },
        Type::Array(array) => {
            let length = crate::mutate::tokens(&array.len);
            values(&array.elem).iter().map(|value| format!("[{value}; {length}]")).collect()
        }
        Type::Paren(inner) => values(&inner.elem),
        // A second `return` of another type does not fit an opaque type, and nothing is of the type `!`.
        _ => Vec::new(),
    }
}

fn path_values(path: &syn::TypePath) -> Vec<String> {
    let Some(last) = path.path.segments.last() else { return Vec::new() };
    let inner: Vec<&Type> = match &last.arguments {
        PathArguments::AngleBracketed(arguments) => arguments
            .args
            .iter()
            .filter_map(|argument| if let GenericArgument::Type(kind) = argument { Some(kind) } else { None })
            .collect(),
        _ => Vec::new(),
    };
    let first = || {
        inner
            .first()
            .map(|kind| values(kind))
            .filter(|all| !all.is_empty())
            .unwrap_or_else(|| texts(&["Default::default()"]))
    };
    match last.ident.to_string().as_str() {
        "bool" => texts(&["true", "false"]),
        "u8" | "u16" | "u32" | "u64" | "u128" | "usize" => texts(&["0", "1"]),
        "i8" | "i16" | "i32" | "i64" | "i128" | "isize" => texts(&["0", "1", "-1"]),
        "f32" | "f64" => texts(&["0.0", "1.0", "-1.0"]),
        "String" => texts(&["String::new()", "\"xyzzy\".into()"]),
        "Option" => [texts(&["None"]), wrapped("Some", first())].concat(),
        // `io::Result<()>` as well as `Result<(), Error>`; a bare `fmt::Result` has no value inside.
        "Result" if inner.is_empty() => texts(&["Ok(Default::default())"]),
        "Result" => wrapped("Ok", first()),
        "Vec" => {
            [texts(&["vec![]"]), first().iter().map(|value| format!("vec![{value}]")).collect()].concat()
        }
        name @ ("Box" | "Arc" | "Rc" | "Cell" | "RefCell" | "Mutex" | "RwLock") => {
            wrapped(&format!("{name}::new"), first())
        }
        name @ ("HashMap" | "HashSet" | "BTreeMap" | "BTreeSet" | "VecDeque") => {
            vec![format!("{name}::default()")]
        }
        _ => texts(&["Default::default()"]),
    }
}

fn texts(all: &[&str]) -> Vec<String> {
    all.iter().map(|text| (*text).to_string()).collect()
}

fn wrapped(constructor: &str, values: Vec<String>) -> Vec<String> {
    values.iter().map(|value| format!("{constructor}({value})")).collect()
}
