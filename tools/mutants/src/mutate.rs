//! Finds the mutants of a source file: the kinds and the names of cargo-mutants, so that its exclusions apply here too.

use std::ops::Range;

use proc_macro2::Span;
use serde::{Deserialize, Serialize};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, BinOp, Expr, UnOp};

use crate::values;

/// One change of the source.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Mutant {
    /// `FILE:LINE:COLUMN: what is replaced`, which identifies it across runs.
    pub name: String,
    /// The file, relative to the workspace.
    pub file: String,
    /// The function around it.
    pub function: String,
}

/// A place in a file where one of several mutants is chosen at run time.
#[derive(Clone, Debug)]
pub struct Site {
    /// The bytes of the file that the schema encloses; empty for an insertion.
    pub range: Range<usize>,
    pub kind: SiteKind,
    /// Each mutant with its code.
    pub mutants: Vec<(Mutant, String)>,
}

/// How the mutants of a site become code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SiteKind {
    /// An expression with alternatives.
    Expression,
    /// The begin of a function's body, which returns a value at once.
    Body,
    /// A match arm without guard: the range is empty and behind the pattern.
    Arm,
    /// A match arm with a guard, which is the range.
    GuardedArm,
}

/// Mutants of a file, and what was passed over.
#[derive(Default)]
pub struct Found {
    pub sites: Vec<Site>,
    /// Mutants in constants and `const fn`, which are evaluated at compile time.
    pub constant: usize,
    /// Macro calls, which are not searched.
    pub macros: usize,
    /// The bytes of each function.
    pub functions: Vec<Range<usize>>,
    /// Modules in files of their own: name path, and the value of a `path` attribute.
    pub modules: Vec<(Vec<String>, Option<String>)>,
    /// Where the first item starts.
    pub first_item: usize,
}

/// Parses `text`, the file `file`, and collects its mutants.
pub fn find(file: &str, text: &str) -> syn::Result<Found> {
    let parsed = syn::parse_file(text)?;
    let mut finder = Finder {
        file,
        text,
        found: Found::default(),
        namespace: Vec::new(),
        function: String::new(),
        constant: false,
    };
    finder.found.first_item = parsed.items.first().map_or(text.len(), |item| item.span().byte_range().start);
    finder.visit_file(&parsed);
    Ok(finder.found)
}

/// The text of a syntax element with its whitespace collapsed, from its own tokens.
pub fn tokens(element: &impl Spanned) -> String {
    element.span().source_text().map(|text| collapse(&text)).unwrap_or_default()
}

fn collapse(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

struct Finder<'a> {
    file: &'a str,
    text: &'a str,
    found: Found,
    namespace: Vec<String>,
    function: String,
    constant: bool,
}

impl Finder<'_> {
    fn text_of(&self, element: &impl Spanned) -> &str {
        self.text.get(element.span().byte_range()).unwrap_or_default()
    }

    /// Adds a site, unless it is evaluated at compile time. `mutants` are descriptions and code.
    fn site(&mut self, kind: SiteKind, range: Range<usize>, at: Span, mutants: Vec<(String, String)>) {
        if self.constant {
            self.found.constant += mutants.len();
            return;
        }
        let (line, column) = (at.start().line, at.start().column + 1);
        let mutants = mutants.into_iter().map(|(what, code)| {
            let name = format!("{}:{line}:{column}: {what}", self.file);
            (Mutant { name, file: self.file.to_string(), function: self.function.clone() }, code)
        });
        let mutants: Vec<_> = mutants.collect();
        if !mutants.is_empty() {
            self.found.sites.push(Site { range, kind, mutants });
        }
    }

    fn in_function(&self) -> String {
        if self.function.is_empty() { String::new() } else { format!(" in {}", self.function) }
    }

    fn function(&mut self, signature: &syn::Signature, block: &syn::Block) {
        if signature.unsafety.is_some() {
            return;
        }
        let name = [self.namespace.as_slice(), &[signature.ident.to_string()]].concat().join("::");
        let outer = std::mem::replace(&mut self.function, name.clone());
        let constant = std::mem::replace(&mut self.constant, signature.constness.is_some());
        self.found.functions.push(block.span().byte_range());
        if let Some(first) = block.stmts.first()
            && !(signature.ident == "default"
                && self.namespace.last().is_some_and(|name| name.starts_with("<impl Default")))
        {
            let start = block.brace_token.span.open().byte_range().end;
            let output = match &signature.output {
                syn::ReturnType::Default => String::new(),
                syn::ReturnType::Type(_, kind) => format!(" -> {}", tokens(kind)),
            };
            let own = collapse(self.text_of(block).trim_matches(['{', '}']));
            let mutants = values::replacements(&signature.output).into_iter().filter(|value| *value != own);
            let mutants =
                mutants.map(|value| (format!("replace {name}{output} with {value}"), value)).collect();
            self.site(SiteKind::Body, start..start, first.span(), mutants);
        }
        visit::visit_block(self, block);
        self.function = outer;
        self.constant = constant;
    }

    fn within(&mut self, name: String, visit: impl FnOnce(&mut Self)) {
        self.namespace.push(name);
        visit(self);
        self.namespace.pop();
    }

    fn constant(&mut self, expression: &Expr) {
        let outer = std::mem::replace(&mut self.constant, true);
        self.visit_expr(expression);
        self.constant = outer;
    }
}

/// Whether an item is only there for tests, or marked to be left alone.
fn skipped(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let text = tokens(attribute);
        let is_test = text.contains("test") && !text.contains("not(test");
        (attribute.path().is_ident("cfg") && is_test)
            || attribute.path().is_ident("test")
            || text.contains("mutants::skip")
    })
}

/// Whether a chain of `&&` has a `let` in it, which can be part of nothing else.
fn has_let(expression: &Expr) -> bool {
    match expression {
        Expr::Let(_) => true,
        Expr::Binary(binary) => {
            matches!(binary.op, BinOp::And(_)) && (has_let(&binary.left) || has_let(&binary.right))
        }
        _ => false,
    }
}

/// The operator and those it is replaced with.
fn alternatives(op: &BinOp) -> (&'static str, &'static [&'static str]) {
    match op {
        BinOp::Eq(_) => ("==", &["!="]),
        BinOp::Ne(_) => ("!=", &["=="]),
        BinOp::And(_) => ("&&", &["||"]),
        BinOp::Or(_) => ("||", &["&&"]),
        BinOp::Lt(_) => ("<", &["==", ">", "<="]),
        BinOp::Gt(_) => (">", &["==", "<", ">="]),
        BinOp::Le(_) => ("<=", &[">"]),
        BinOp::Ge(_) => (">=", &["<"]),
        BinOp::Add(_) => ("+", &["-", "*"]),
        BinOp::Sub(_) => ("-", &["+", "/"]),
        BinOp::Mul(_) => ("*", &["+", "/"]),
        BinOp::Div(_) => ("/", &["%", "*"]),
        BinOp::Rem(_) => ("%", &["/", "+"]),
        BinOp::Shl(_) => ("<<", &[">>"]),
        BinOp::Shr(_) => (">>", &["<<"]),
        BinOp::BitAnd(_) => ("&", &["|", "^"]),
        BinOp::BitOr(_) => ("|", &["&", "^"]),
        BinOp::BitXor(_) => ("^", &["|", "&"]),
        BinOp::AddAssign(_) => ("+=", &["-=", "*="]),
        BinOp::SubAssign(_) => ("-=", &["+=", "/="]),
        BinOp::MulAssign(_) => ("*=", &["+=", "/="]),
        BinOp::DivAssign(_) => ("/=", &["%=", "*="]),
        BinOp::RemAssign(_) => ("%=", &["/=", "+="]),
        BinOp::ShlAssign(_) => ("<<=", &[">>="]),
        BinOp::ShrAssign(_) => (">>=", &["<<="]),
        BinOp::BitAndAssign(_) => ("&=", &["|="]),
        BinOp::BitOrAssign(_) => ("|=", &["&="]),
        BinOp::BitXorAssign(_) => ("^=", &["|=", "&="]),
        _ => ("", &[]),
    }
}

impl<'ast> Visit<'ast> for Finder<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if skipped(&item.attrs) {
            return;
        }
        if item.content.is_some() {
            self.within(item.ident.to_string(), |this| visit::visit_item_mod(this, item));
            return;
        }
        let path =
            item.attrs.iter().filter(|attribute| attribute.path().is_ident("path")).find_map(|attribute| {
                match &attribute.meta {
                    syn::Meta::NameValue(pair) => Some(tokens(&pair.value).trim_matches('"').to_string()),
                    _ => None,
                }
            });
        let names = [self.namespace.as_slice(), &[item.ident.to_string()]].concat();
        self.found.modules.push((names, path));
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !skipped(&item.attrs) {
            self.function(&item.sig, &item.block);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !skipped(&item.attrs) {
            self.function(&item.sig, &item.block);
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default
            && !skipped(&item.attrs)
        {
            self.function(&item.sig, block);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if skipped(&item.attrs) {
            return;
        }
        let own = tokens(&item.self_ty);
        let name = match &item.trait_ {
            Some((_, path, _)) => format!("<impl {} for {own}>", tokens(path)),
            None => own,
        };
        self.within(name, |this| visit::visit_item_impl(this, item));
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        if !skipped(&item.attrs) {
            self.within(item.ident.to_string(), |this| visit::visit_item_trait(this, item));
        }
    }

    fn visit_item_const(&mut self, item: &'ast syn::ItemConst) {
        self.constant(&item.expr);
    }

    fn visit_impl_item_const(&mut self, item: &'ast syn::ImplItemConst) {
        self.constant(&item.expr);
    }

    fn visit_item_static(&mut self, item: &'ast syn::ItemStatic) {
        self.constant(&item.expr);
    }

    fn visit_expr_const(&mut self, _: &'ast syn::ExprConst) {}

    fn visit_type(&mut self, _: &'ast syn::Type) {}

    fn visit_pat(&mut self, _: &'ast syn::Pat) {}

    fn visit_generic_argument(&mut self, _: &'ast syn::GenericArgument) {}

    fn visit_variant(&mut self, _: &'ast syn::Variant) {}

    fn visit_macro(&mut self, _: &'ast syn::Macro) {
        self.found.macros += 1;
    }

    fn visit_attribute(&mut self, _: &'ast Attribute) {}

    fn visit_local(&mut self, item: &'ast syn::Local) {
        if !skipped(&item.attrs) {
            visit::visit_local(self, item);
        }
    }

    fn visit_expr_repeat(&mut self, item: &'ast syn::ExprRepeat) {
        self.visit_expr(&item.expr);
        self.constant(&item.len);
    }

    fn visit_expr_closure(&mut self, item: &'ast syn::ExprClosure) {
        // The body runs later, even where the closure itself is a constant, as in a `LazyLock`.
        let constant = std::mem::replace(&mut self.constant, false);
        visit::visit_expr_closure(self, item);
        self.constant = constant;
    }

    fn visit_expr_binary(&mut self, item: &'ast syn::ExprBinary) {
        let (own, others) = alternatives(&item.op);
        if !has_let(&item.left) && !has_let(&item.right) {
            let (left, right) = (self.text_of(&item.left), self.text_of(&item.right));
            let assigns = own.ends_with('=') && !matches!(own, "==" | "!=" | "<=" | ">=");
            let mutants = others.iter().map(|other| {
                let code = if assigns {
                    format!("{left} {other} {right}")
                } else {
                    format!("({left}) {other} ({right})")
                };
                (format!("replace {own} with {other}{}", self.in_function()), code)
            });
            let mutants = mutants.collect();
            self.site(SiteKind::Expression, item.span().byte_range(), item.op.span(), mutants);
        }
        visit::visit_expr_binary(self, item);
    }

    fn visit_expr_unary(&mut self, item: &'ast syn::ExprUnary) {
        let own = match item.op {
            UnOp::Not(_) => "!",
            UnOp::Neg(_) => "-",
            _ => "",
        };
        if !own.is_empty() {
            let mutants =
                vec![(format!("delete {own}{}", self.in_function()), self.text_of(&item.expr).to_string())];
            self.site(SiteKind::Expression, item.span().byte_range(), item.op.span(), mutants);
        }
        visit::visit_expr_unary(self, item);
    }

    fn visit_expr_match(&mut self, item: &'ast syn::ExprMatch) {
        let has_rest =
            item.arms.iter().any(|arm| matches!(arm.pat, syn::Pat::Wild(_)) && arm.guard.is_none());
        for arm in &item.arms {
            let pattern = arm.pat.span().byte_range();
            let guard_has_let = arm.guard.as_ref().is_some_and(|(_, guard)| has_let(guard));
            if has_rest && !guard_has_let && !matches!(arm.pat, syn::Pat::Wild(_)) {
                let what = format!("delete match arm {}{}", tokens(&arm.pat), self.in_function());
                let (kind, range) = match &arm.guard {
                    Some((_, guard)) => (SiteKind::GuardedArm, guard.span().byte_range()),
                    None => (SiteKind::Arm, pattern.end..pattern.end),
                };
                self.site(kind, range, arm.span(), vec![(what, String::new())]);
            }
            if let Some((_, guard)) = &arm.guard
                && !guard_has_let
            {
                let mutants = ["true", "false"].iter().map(|value| {
                    let what =
                        format!("replace match guard {} with {value}{}", tokens(guard), self.in_function());
                    (what, (*value).to_string())
                });
                let mutants = mutants.collect();
                self.site(SiteKind::Expression, guard.span().byte_range(), guard.span(), mutants);
            }
        }
        visit::visit_expr_match(self, item);
    }

    fn visit_expr_struct(&mut self, item: &'ast syn::ExprStruct) {
        if item.rest.is_some() {
            let whole = item.span().byte_range();
            let path = tokens(&item.path);
            let mut mutants = Vec::new();
            for pair in item.fields.pairs() {
                let (field, comma) = pair.into_tuple();
                let name = tokens(&field.member);
                let start = field.span().byte_range().start;
                let end = comma.map_or(field.span().byte_range().end, |comma| comma.span().byte_range().end);
                let code = [self.text.get(whole.start..start), self.text.get(end..whole.end)]
                    .map(Option::unwrap_or_default)
                    .concat();
                mutants.push((
                    format!("delete field {name} from struct {path} expression{}", self.in_function()),
                    code,
                ));
            }
            self.site(SiteKind::Expression, whole, item.span(), mutants);
        }
        visit::visit_expr_struct(self, item);
    }
}
