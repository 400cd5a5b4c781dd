// Text: lists of words in messages, and what readers of them can be given.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace holmes {

// Adds `word` to a list in `text`: with `between` in front, unless it is the first one.
inline void add_word(std::string& text, std::string_view word, std::string_view between = ", ") {
  if (!text.empty()) text += between;
  text += word;
}

// `words` (a range of text, or of what `of` makes text of) with `between` between them; empty where there are none.
template <class Words, class Of = std::identity>
std::string joined(const Words& words, std::string_view between = ", ", const Of& of = {}) {
  std::string text;
  for (const auto& word : words) add_word(text, of(word), between);
  return text;
}

// Bytes that are no UTF-8 as \xff: what the system names so (hosts, files, variables) is in messages, and those are
// text to Python, JSON and terminals.
std::string readable(std::string text);

template <class Words>
std::string or_none(const Words& words) {
  return words.empty() ? "none" : joined(words);
}

}  // namespace holmes
