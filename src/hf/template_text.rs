//! Limits on the text of a chat template, checked before the engine parses it.
//!
//! The engine stops at 150 nested brackets and blocks. Without a limit, its parser and compiler
//! also recurse for each operator of an expression and for each `elif`, and its compiler computes
//! expressions of constants. So this module counts these in the engine's tokens.

use minijinja::machinery::{Token, WhitespaceConfig, tokenize};

/// The most bytes of a template. The longest of 54 published templates has 17 KB.
const MOST_BYTES: usize = 512 << 10;

/// The most operators, brackets and keywords in one tag. Published templates have up to 23. Each
/// takes stack frames of the parser or the compiler, and 500 fit in a thread's stack of 2 MB.
const MOST_OPERATORS: usize = 500;

/// The most `elif`: a branch is compiled inside the branch before it. Published templates have up
/// to 10.
const MOST_BRANCHES: usize = 300;

/// The most bytes that products of constants may have. They are computed while the template is
/// compiled, where the limits of rendering do not hold.
const MOST_CONSTANT_BYTES: f64 = (64u32 << 20) as f64;

/// Refuses a template that the engine could not parse with bounded stack and memory.
pub(super) fn check(source: &str) -> Result<(), String> {
    let bytes = source.len();
    if bytes > MOST_BYTES {
        return Err(format!("it has {bytes} bytes, and may have at most {MOST_BYTES}"));
    }
    let mut tag = Tag::default();
    let mut constants = 0.0;
    let mut branches = 0;
    let tokens = tokenize(source, false, Default::default(), WhitespaceConfig::default());
    // The parser reports an invalid token, with its place.
    for (token, span) in tokens.map_while(Result::ok) {
        match token {
            Token::VariableStart | Token::BlockStart => {
                tag = Tag { begins: span.end_offset as usize, ..Tag::default() };
            }
            Token::VariableEnd | Token::BlockEnd if tag.multiplies => {
                let length = (span.start_offset as usize).saturating_sub(tag.begins);
                constants += length as f64 * tag.product;
            }
            Token::Ident("elif") => branches += 1,
            _ => {}
        }
        tag.count(&token);
        let line = span.start_line;
        if tag.operators > MOST_OPERATORS {
            return Err(format!(
                "a tag in line {line} has more than {MOST_OPERATORS} operators and brackets, \
                 which is the most"
            ));
        }
        if constants > MOST_CONSTANT_BYTES {
            return Err(format!(
                "a tag in line {line} multiplies constants to more than 64 MiB, which is the most"
            ));
        }
    }
    match branches > MOST_BRANCHES {
        true => Err(format!("it has {branches} elif, and may have at most {MOST_BRANCHES}")),
        false => Ok(()),
    }
}

/// The counts of one tag.
struct Tag {
    /// The byte behind its opening bracket.
    begins: usize,
    operators: usize,
    multiplies: bool,
    /// An upper bound of all sums and products of the tag's constants.
    product: f64,
}

impl Default for Tag {
    fn default() -> Tag {
        Tag { begins: 0, operators: 0, multiplies: false, product: 1.0 }
    }
}

impl Tag {
    fn count(&mut self, token: &Token<'_>) {
        let number = match token {
            Token::Int(number) => Some(*number as f64),
            Token::Int128(number) => Some(**number as f64),
            // Dividing by a fraction multiplies.
            Token::Float(number) => Some(number.max(1.0 / number)),
            Token::Ident("true" | "True") => Some(1.0),
            Token::Pow => Some(f64::INFINITY),
            _ => None,
        };
        // The sum of numbers from 2 on is at most their product.
        self.product *= number.map_or(1.0, |number| number.max(2.0));
        self.multiplies |= matches!(token, Token::Mul);
        self.operators += usize::from(match token {
            Token::Ident(word) => {
                matches!(*word, "not" | "and" | "or" | "in" | "is" | "if" | "else")
            }
            Token::Plus
            | Token::Minus
            | Token::Mul
            | Token::Div
            | Token::FloorDiv
            | Token::Pow
            | Token::Mod
            | Token::Dot
            | Token::Tilde
            | Token::Pipe
            | Token::Eq
            | Token::Ne
            | Token::Gt
            | Token::Gte
            | Token::Lt
            | Token::Lte
            | Token::BracketOpen
            | Token::ParenOpen
            | Token::BraceOpen => true,
            _ => false,
        });
    }
}
