// Text: lists of words in messages.
#pragma once

#include <string>
#include <string_view>

namespace holmes {

// `words` (a range of text) with `between` between them; empty where there are none.
template <class Words>
std::string joined(const Words& words, std::string_view between = ", ") {
  std::string text;
  for (const auto& word : words) {
    if (!text.empty()) text += between;
    text += word;
  }
  return text;
}

template <class Words>
std::string or_none(const Words& words) {
  return words.empty() ? "none" : joined(words);
}

}  // namespace holmes
