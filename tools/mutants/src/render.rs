//! Writes a file with all its mutants in it: the schema.
//!
//! An expression `a + b` becomes `(if !any(7, 9) { a + b } else if is(7) { (a) - (b) } else { (a) * (b) })`: the
//! original comes first, so that the types of the mutants are inferred from it. Only one mutant is active at a time, so
//! their code is copied from the original and has no further mutants inside.

use std::cmp::Reverse;
use std::ops::Range;

use crate::mutate::{Site, SiteKind};

/// A site whose mutants have the identifiers `first`, `first + 1` and so on.
pub struct Numbered {
    pub site: Site,
    pub first: usize,
}

/// The text of a schema, and where everything is in it.
#[derive(Debug, Default)]
pub struct Schema {
    pub text: String,
    /// The bytes of each mutant's code.
    pub fragments: Vec<(usize, Range<usize>)>,
    /// The bytes of each site with the identifiers of its mutants, inner sites first.
    pub sites: Vec<(Range<usize>, Range<usize>)>,
    /// The bytes of each function.
    pub functions: Vec<Range<usize>>,
}

/// Text before and after a range of the original; fragments are relative to `after`, or `before` if that is empty.
struct Edit {
    range: Range<usize>,
    before: String,
    after: String,
    fragments: Vec<(usize, Range<usize>)>,
    ids: Range<usize>,
}

fn edit(numbered: &Numbered, dropped: &dyn Fn(usize) -> bool) -> Option<Edit> {
    let Numbered { site, first } = numbered;
    let end = first + site.mutants.len();
    let kept: Vec<(usize, &str)> =
        site.mutants.iter().enumerate().map(|(at, (_, code))| (first + at, code.as_str())).collect();
    let kept: Vec<(usize, &str)> = kept.into_iter().filter(|(id, _)| !dropped(*id)).collect();
    let (last, _) = *kept.last()?;
    let mut edit = Edit {
        range: site.range.clone(),
        before: String::new(),
        after: String::new(),
        fragments: Vec::new(),
        ids: *first..end,
    };
    match site.kind {
        SiteKind::Expression => {
            edit.before = format!("(if !crate::__mutants::any({first}, {end}) {{ ");
            edit.after.push_str(" }");
            for (id, code) in kept {
                let condition =
                    if id == last { String::new() } else { format!(" if crate::__mutants::is({id})") };
                edit.after.push_str(&format!(" else{condition} {{ "));
                let start = edit.after.len();
                edit.after.push_str(code);
                edit.fragments.push((id, start..edit.after.len()));
                edit.after.push_str(" }");
            }
            edit.after.push(')');
        }
        SiteKind::Body => {
            edit.before = format!(" if crate::__mutants::any({first}, {end}) {{");
            for (id, code) in kept {
                edit.before.push_str(&format!(" if crate::__mutants::is({id}) {{ "));
                let start = edit.before.len();
                edit.before.push_str(&format!("return {code};"));
                edit.fragments.push((id, start..edit.before.len()));
                edit.before.push_str(" }");
            }
            edit.before.push_str(" } ");
        }
        SiteKind::Arm | SiteKind::GuardedArm => {
            let condition = format!("!crate::__mutants::any({first}, {end})");
            if site.kind == SiteKind::Arm {
                edit.before = format!(" if {condition}");
            } else {
                edit.before = format!("{condition} && (");
                edit.after.push(')');
            }
        }
    }
    Some(edit)
}

/// Encloses all sites but those whose mutants are all `dropped`. `header` is inserted at the byte `header_at`.
pub fn render(
    text: &str,
    sites: &[Numbered],
    functions: &[Range<usize>],
    header: Option<(usize, &str)>,
    dropped: &dyn Fn(usize) -> bool,
) -> Schema {
    let mut edits: Vec<Edit> = sites.iter().filter_map(|site| edit(site, dropped)).collect();
    edits.extend(functions.iter().map(|range| Edit {
        range: range.clone(),
        before: String::new(),
        after: String::new(),
        fragments: Vec::new(),
        ids: 0..0,
    }));
    if let Some((at, header)) = header {
        edits.push(Edit {
            range: at..at,
            before: header.to_string(),
            after: String::new(),
            fragments: Vec::new(),
            ids: 0..0,
        });
    }
    // Stable: of two sites with the same range, the outer one was found first.
    edits.sort_by_key(|edit| (edit.range.start, !edit.range.is_empty(), Reverse(edit.range.end)));

    let mut schema = Schema::default();
    let mut open: Vec<(Edit, usize)> = Vec::new();
    let mut copied = 0;
    for edit in edits {
        close(&mut schema, text, &mut open, &mut copied, edit.range.start);
        schema.text.push_str(&text[copied..edit.range.start]);
        copied = edit.range.start;
        let start = schema.text.len();
        schema.text.push_str(&edit.before);
        open.push((edit, start));
    }
    close(&mut schema, text, &mut open, &mut copied, text.len());
    schema.text.push_str(&text[copied..]);
    schema
}

/// Completes the open edits that end at the byte `until` or before.
fn close(schema: &mut Schema, text: &str, open: &mut Vec<(Edit, usize)>, copied: &mut usize, until: usize) {
    while let Some((edit, start)) = open.pop_if(|(edit, _)| edit.range.end <= until) {
        schema.text.push_str(&text[*copied..edit.range.end]);
        *copied = edit.range.end;
        let base = if edit.after.is_empty() { start } else { schema.text.len() };
        schema.text.push_str(&edit.after);
        schema
            .fragments
            .extend(edit.fragments.into_iter().map(|(id, range)| (id, base + range.start..base + range.end)));
        if edit.ids.is_empty() {
            schema.functions.push(start..schema.text.len());
        } else {
            schema.sites.push((start..schema.text.len(), edit.ids));
        }
    }
}

impl Schema {
    /// The mutants at fault for an error at the bytes `spans`, of which the first is the primary one: those whose code
    /// has the error, else those of the innermost site, else, if `desperate`, those of the function around it.
    pub fn at_fault(&self, spans: &[Range<usize>], desperate: bool) -> Vec<usize> {
        let within =
            |inner: &Range<usize>, outer: &Range<usize>| inner.start >= outer.start && inner.end <= outer.end;
        for span in spans {
            let around = self.fragments.iter().filter(|(_, range)| within(span, range));
            if let Some((id, _)) = around.min_by_key(|(_, range)| range.len()) {
                return vec![*id];
            }
        }
        for span in spans {
            if let Some((_, ids)) = self
                .sites
                .iter()
                .filter(|(range, _)| within(span, range))
                .min_by_key(|(range, _)| range.len())
            {
                return ids.clone().collect();
            }
        }
        if desperate
            && let Some(span) = spans.first()
            && let Some(function) =
                self.functions.iter().filter(|range| within(span, range)).min_by_key(|range| range.len())
        {
            return self
                .sites
                .iter()
                .filter(|(range, _)| within(range, function))
                .flat_map(|(_, ids)| ids.clone())
                .collect();
        }
        Vec::new()
    }
}
