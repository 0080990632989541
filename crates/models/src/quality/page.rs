//! A page with the error of each layer and role as a picture.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::tensors::TensorError;
use super::text::TextComparison;

/// The page: HTML with a drawing, no scripts.
pub fn error_page(title: &str, text: Option<&TextComparison>, tensors: &[TensorError]) -> String {
    let mut page = String::from(
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content=\"width=device-width\">\
         <style>body{font:14px system-ui;margin:2em;max-width:72em}table{border-collapse:collapse}td,th{padding:.2em .8em;\
         text-align:right}td:first-child,th:first-child{text-align:left}svg{width:100%;height:auto}\
         @media(prefers-color-scheme:dark){body{background:#111;color:#ddd}text{fill:#ddd}}</style>",
    );
    // Writing to a string cannot fail.
    let _ = write!(page, "<title>{0}</title><h1>{0}</h1>", escaped(title));
    if let Some(text) = text {
        let _ = write!(
            page,
            "<table><tr><th>perplexity of the reference<td>{:.4}<tr><th>perplexity<td>{:.4}<tr><th>KL divergence, mean\
             <td>{:.5}<tr><th>median<td>{:.5}<tr><th>99 %<td>{:.5}<tr><th>same most probable token<td>{:.2} % ± {:.2}</table>",
            text.reference,
            text.other,
            text.divergence,
            text.median,
            text.quantile99,
            100.0 * text.same_top.mean,
            100.0 * text.same_top.margin
        );
    }
    page.push_str("<h2>Relative error by layer</h2>");
    page.push_str(&drawing(tensors));
    page.push_str("<h2>Tensors</h2><table><tr><th>tensor<th>type<th>RMS error<th>relative");
    for tensor in tensors.iter().filter(|tensor| tensor.rms > 0.0) {
        let _ = write!(
            page,
            "<tr><td>{}<td>{}<td>{:.3e}<td>{:.3} %",
            escaped(&tensor.name),
            tensor.other,
            tensor.rms,
            100.0 * tensor.relative
        );
    }
    page.push_str("</table></html>\n");
    page
}

/// The most layers that are drawn; no model has as many.
const MAX_LAYERS: usize = 4096;

/// The column of a tensor.
fn layer_of(tensor: &TensorError) -> Option<usize> {
    tensor.layer.filter(|layer| *layer < MAX_LAYERS)
}

/// One row per role, one cell per layer; darker cells have a larger error.
fn drawing(tensors: &[TensorError]) -> String {
    let mut roles: BTreeMap<&str, Vec<(usize, &TensorError)>> = BTreeMap::new();
    for tensor in tensors.iter().filter(|tensor| tensor.rms > 0.0) {
        let role = match layer_of(tensor) {
            Some(_) => tensor.name.splitn(3, '.').nth(2).unwrap_or(&tensor.name),
            None => &tensor.name,
        };
        roles.entry(role).or_default().push((layer_of(tensor).unwrap_or_default(), tensor));
    }
    let layers = tensors.iter().filter_map(layer_of).max().map_or(1, |layer| layer + 1);
    let most = tensors.iter().map(|tensor| tensor.relative).fold(1e-12, f64::max);
    let (cell, label) = (18, 190);
    let (width, height) = (label + layers * cell + 10, roles.len() * cell + 24);
    let mut svg = format!("<svg viewBox=\"0 0 {width} {height}\" role=img aria-label=\"error by layer\">");
    for (row, (role, cells)) in roles.iter().enumerate() {
        let y = row * cell;
        let _ = write!(svg, "<text x=0 y={} font-size=11>{}</text>", y + 13, escaped(role));
        for (layer, tensor) in cells {
            let share = tensor.relative / most;
            let _ = write!(
                svg,
                "<rect x={} y={y} width={} height={} fill=\"hsl({:.0} 75% {:.0}%)\"><title>{}: {:.3} % ({})</title></rect>",
                label + layer * cell,
                cell - 1,
                cell - 1,
                220.0 - 220.0 * share,
                85.0 - 40.0 * share,
                escaped(&tensor.name),
                100.0 * tensor.relative,
                tensor.other
            );
        }
    }
    let _ = write!(
        svg,
        "<text x={label} y={} font-size=11>layer 0 to {}; largest relative error {:.2} %</text></svg>",
        height - 6,
        layers - 1,
        100.0 * most
    );
    svg
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use quadriga_graph::DType;

    use super::*;

    #[test]
    fn a_layer_that_no_model_has_is_a_row_of_its_own() {
        let name = format!("blk.{}.x", usize::MAX);
        let tensor = |name: &str, layer| TensorError {
            name: name.to_owned(),
            layer: Some(layer),
            reference: DType::F32,
            other: DType::Q8_0,
            elements: 1,
            rms: 1.0,
            relative: 0.5,
        };
        let page = error_page("a", None, &[tensor(&name, usize::MAX), tensor("blk.1.x", 1)]);
        assert!(page.contains(&format!(">{name}</text>")), "{page}");
        assert!(page.contains("layer 0 to 1"), "{page}");
    }
}
