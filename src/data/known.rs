//! Which tokens and classes a model knows.

use super::reader::Reader;

impl Reader {
    /// Refuses tokens that the tokenizer has and the model does not.
    pub(super) fn check_known(&self, tokens: &[u32]) -> Result<(), String> {
        self.vocabulary.check(tokens, self.tokens)
    }

    /// The class that a number means. If a class has a number for its name, numbers are names;
    /// otherwise they count the classes from 0. So a label means the same in each format, whether
    /// the format has numbers or only text.
    pub(super) fn class_of_number(&self, number: f64) -> Result<i32, String> {
        let classes = self.classes;
        if !self.has_names_of_numbers() {
            let class = (0..classes).find(|&class| class as f64 == number);
            return class.map(|class| class as i32).ok_or_else(|| no_class(number, classes));
        }
        let class = self.names.iter().position(|name| number_of(name) == Some(number));
        class.map(|class| class as i32).ok_or_else(|| {
            let names = self.names.join(", ");
            format!(
                "label {number} is none of {names}: a class has a number for its name, so labels \
                 that are numbers are names, too"
            )
        })
    }

    /// Whether a class has a number for its name.
    pub(super) fn has_names_of_numbers(&self) -> bool {
        self.names.iter().any(|name| number_of(name).is_some())
    }
}

/// The number that a name is.
fn number_of(name: &str) -> Option<f64> {
    name.parse().ok().filter(|number: &f64| number.is_finite())
}

pub(super) fn no_class(label: impl std::fmt::Display, classes: usize) -> String {
    format!("label {label} is none of the {classes} classes, which count from 0")
}
