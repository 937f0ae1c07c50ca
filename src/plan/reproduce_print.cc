#include <algorithm>
#include <nlohmann/json.hpp>

#include "plan/reproduce.h"

namespace disagmoe {
namespace {

// Columns of a character count; "×" and the like are one.
size_t Width(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string Padded(const std::string& text, size_t width) { return text + std::string(width - std::min(width, Width(text)), ' '); }

// Words of `text` in lines of at most `width` characters.
std::string Wrapped(const std::string& text, const std::string& indent, size_t width) {
  std::string out = indent;
  size_t used = indent.size();
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(' ', at), text.size());
    const std::string word = text.substr(at, end - at);
    if (used + 1 + Width(word) > width && used > indent.size()) {
      out += "\n" + indent;
      used = indent.size();
    }
    out += (used > indent.size() ? " " : "") + word;
    used += 1 + Width(word);
    at = end + 1;
  }
  return out + "\n";
}

}  // namespace

std::string PrintClaims(const std::vector<ClaimTable>& tables) {
  std::string out;
  for (const ClaimTable& t : tables) {
    out += (out.empty() ? "" : "\n") + t.title + "  [" + t.id + "]\n" + Wrapped("calibration: " + t.calibration, "  ", 118);
    std::vector<size_t> widths(t.columns.size());
    for (size_t i = 0; i < widths.size(); ++i) {
      widths[i] = Width(t.columns[i]);
      for (const auto& row : t.rows) widths[i] = std::max(widths[i], Width(row[i]));
    }
    const auto line = [&](const std::vector<std::string>& cells) {
      std::string text = " ";
      for (size_t i = 0; i < cells.size(); ++i) text += " " + Padded(cells[i], widths[i]) + " ";
      return text.substr(0, text.find_last_not_of(' ') + 1) + "\n";
    };
    out += line(t.columns);
    for (const auto& row : t.rows) out += line(row);
    out += Wrapped("verdict: " + t.verdict, "  ", 118);
  }
  return out;
}

std::string ClaimsMarkdown(const std::vector<ClaimTable>& tables) {
  std::string out;
  const auto line = [&](const std::vector<std::string>& cells) {
    out += "|";
    for (const std::string& cell : cells) out += " " + cell + " |";
    out += "\n";
  };
  for (const ClaimTable& t : tables) {
    out += "## " + t.title + "\n\n" + Wrapped("Calibration: " + t.calibration, "", 118) + "\n";
    line(t.columns);
    line(std::vector<std::string>(t.columns.size(), "---"));
    for (const auto& row : t.rows) line(row);
    out += "\n" + Wrapped("**Verdict**: " + t.verdict, "", 118) + "\n";
  }
  return out;
}

std::string ClaimsJson(const std::vector<ClaimTable>& tables) {
  using nlohmann::ordered_json;
  ordered_json out = ordered_json::array();
  for (const ClaimTable& t : tables) {
    ordered_json rows = ordered_json::array();
    for (const auto& row : t.rows) {
      ordered_json object;
      for (size_t i = 0; i < row.size(); ++i) object[t.columns[i]] = row[i];
      rows.push_back(object);
    }
    out.push_back({{"id", t.id}, {"title", t.title}, {"calibration", t.calibration}, {"rows", rows}, {"verdict", t.verdict}});
  }
  return out.dump(1) + "\n";
}

}  // namespace disagmoe
