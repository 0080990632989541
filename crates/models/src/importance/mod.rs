//! Importance matrices: how much each input of a weight matrix contributes, measured on a text.
