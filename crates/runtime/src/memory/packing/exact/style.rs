//! The order in which possibilities are tried. None is best for all problems; together they are good for most.

/// Where to decide next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Where {
    /// At the section with the fewest possibilities; of these at the one with most left to place.
    #[default]
    FewestChoices,
    /// At the section with least to spare.
    Tightest,
    /// Where a valley is narrow and possibilities are few.
    Narrowest,
    /// In the lowest valley.
    Lowest,
}

/// What to try first there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum First {
    #[default]
    Longest,
    Largest,
    Smallest,
    Shortest,
    /// The item that lives where most is left to place.
    Crowded,
}

/// A way to go through the possibilities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Style {
    pub(super) at: Where,
    pub(super) first: First,
}

const fn style(at: Where, first: First) -> Style {
    Style { at, first }
}

/// The styles, each different from those before it.
pub(super) const STYLES: [Style; 12] = [
    style(Where::FewestChoices, First::Longest),
    style(Where::FewestChoices, First::Largest),
    style(Where::FewestChoices, First::Shortest),
    style(Where::Tightest, First::Smallest),
    style(Where::Narrowest, First::Longest),
    style(Where::Lowest, First::Crowded),
    style(Where::Tightest, First::Largest),
    style(Where::FewestChoices, First::Smallest),
    style(Where::Tightest, First::Shortest),
    style(Where::Narrowest, First::Shortest),
    style(Where::Tightest, First::Longest),
    style(Where::Lowest, First::Longest),
];
