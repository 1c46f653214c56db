//! Reads records of chats: messages, instructions, and prompts with completions that are messages.

use super::Sequence;
use super::reader::Reader;
use super::record::Record;
use crate::hf::{Encoded, Message, RecordValue, RenderedChat, Tokenizer};

/// Answers that cannot be learnt, because the chat template changes them.
#[derive(Default)]
pub(super) struct NotFound {
    chats: usize,
    answers: usize,
    tokens: usize,
}

impl NotFound {
    /// What a person should know of them, if there are any.
    pub(super) fn note(&self) -> Option<String> {
        let NotFound { chats, answers, tokens } = self;
        (*chats > 0).then(|| {
            format!(
                "{tokens} tokens of {answers} answers in {chats} chats are not learnt: the chat \
                 template writes an answer otherwise once later messages follow. Give each answer \
                 a record of its own, as prompt and completion, or mark answers in the template \
                 with {{% generation %}}"
            )
        })
    }
}

impl Reader {
    /// A chat. Only the assistant's messages in `messages`, which follow the prompt, are scored.
    pub(super) fn chat(
        &self,
        prompt: &[Message],
        messages: &[Message],
        tools: &RecordValue,
    ) -> Result<Sequence, String> {
        let template = self.vocabulary.template()?;
        if !prompt.is_empty() && !messages.iter().any(|message| message.role == "assistant") {
            return Err("the completion has no message of the role \"assistant\"".into());
        }
        let mut all = [prompt, messages].concat();
        all[..prompt.len()].iter_mut().for_each(|message| message.is_context = true);
        let chat = template.render_chat(&all, tools)?;
        let encoded = self.vocabulary.encode(&chat.text, None, false)?;
        self.count_not_found(&chat, &encoded);
        self.score_only(encoded, &chat.assistant)
    }

    /// What a person should know of the chats that were read.
    pub(super) fn notes_of_chats(&self) -> Vec<String> {
        let not_found = self.not_found.lock().expect("nothing panics inside").note();
        let today = self.vocabulary.tokenizer().and_then(Tokenizer::date);
        let today = today.filter(|_| !self.has_date).map(|day| {
            format!(
                "the chat template writes the date, which is {day}: set data.date to fix it, so \
                 that a run on another day has the same data"
            )
        });
        not_found.into_iter().chain(today).collect()
    }

    /// Counts the answers of a chat that cannot be learnt, for the note about them.
    fn count_not_found(&self, chat: &RenderedChat, encoded: &Encoded) {
        if chat.not_found.is_empty() {
            return;
        }
        let is_inside = |&&(from, to): &&(usize, usize)| {
            chat.not_found.iter().any(|range| from < range.end && range.start < to)
        };
        let mut count = self.not_found.lock().expect("nothing panics inside");
        count.chats += 1;
        count.answers += chat.not_found.len();
        count.tokens += encoded.spans.iter().filter(is_inside).count();
    }

    /// A record with Alpaca's columns: a chat if the model has a template, else Alpaca's prompt.
    pub(super) fn instruction(&self, record: &Record) -> Result<Sequence, String> {
        let missing = || record.lacks("output is missing, which instruction needs");
        let output = record.output.as_deref().ok_or_else(missing)?;
        let instruction = record.instruction.as_deref().unwrap_or_default();
        let input = record.input.as_deref().filter(|input| !input.is_empty());
        let template = self.vocabulary.tokenizer().map(Tokenizer::template).transpose()?;
        if template.flatten().is_none() {
            return self.completion(&alpaca_prompt(instruction, input), output);
        }
        let asked = match input {
            Some(input) => format!("{instruction}\n\n{input}"),
            None => instruction.into(),
        };
        let messages = vec![Message::new("user", asked), Message::new("assistant", output)];
        self.chat(&[], &record.with_system(messages), &record.tools)
    }
}

/// The prompt of Stanford's Alpaca.
fn alpaca_prompt(instruction: &str, input: Option<&str>) -> String {
    let task = "Below is an instruction that describes a task";
    let ask = "Write a response that appropriately completes the request.";
    match input {
        Some(input) => format!(
            "{task}, paired with an input that provides further context. {ask}\n\n\
             ### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
        ),
        None => {
            format!("{task}. {ask}\n\n### Instruction:\n{instruction}\n\n### Response:\n")
        }
    }
}
