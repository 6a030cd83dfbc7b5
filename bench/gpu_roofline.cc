// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "bench/gpu_report.h"

namespace fovea::bench {
namespace {

constexpr double kWidth = 860, kHeight = 560;
constexpr double kLeft = 70, kRight = 170, kTop = 40, kBottom = 50;
// Operations per byte at the ends of the axis.
constexpr double kMinIntensity = 1, kMaxIntensity = 16384;
constexpr double kMinRate = 1e11, kMaxRate = 2e15;

double x_of(double intensity) {
  const double part = std::log(intensity / kMinIntensity) / std::log(kMaxIntensity / kMinIntensity);
  return kLeft + part * (kWidth - kLeft - kRight);
}
double y_of(double rate) {
  const double part =
      std::log(std::clamp(rate, kMinRate, kMaxRate) / kMinRate) / std::log(kMaxRate / kMinRate);
  return kHeight - kBottom - part * (kHeight - kTop - kBottom);
}

std::string text_at(double x, double y, std::string_view text, std::string_view anchor = "start") {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor,
                     text);
}
std::string line(double x0, double y0, double x1, double y1, std::string_view style) {
  return fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" {}/>\n", x0, y0,
                     x1, y1, style);
}

std::string axes() {
  std::string svg;
  const std::string grid = "stroke=\"#ddd\"";
  for (double intensity = kMinIntensity; intensity <= kMaxIntensity; intensity *= 4) {
    svg += line(x_of(intensity), kTop, x_of(intensity), kHeight - kBottom, grid);
    svg += text_at(x_of(intensity), kHeight - kBottom + 16, fmt::format("{:.0f}", intensity),
                   "middle");
  }
  for (double rate = kMinRate; rate <= kMaxRate; rate *= 10) {
    svg += line(kLeft, y_of(rate), kWidth - kRight, y_of(rate), grid);
    svg += text_at(kLeft - 6, y_of(rate) + 4, fmt::format("{:g}", rate / 1e12), "end");
  }
  svg += text_at((kLeft + kWidth - kRight) / 2, kHeight - 10, "operations per byte", "middle");
  svg += text_at(kLeft, kTop - 8, "TFLOP/s", "end");
  return svg;
}

// Draws the bandwidth slope up to the peak, then the peak.
std::string roof(double read_bytes, double peak, std::string_view dash) {
  const double ridge = peak / read_bytes;
  const double first = std::max(kMinIntensity, kMinRate / read_bytes);
  const std::string style = fmt::format("stroke=\"black\" stroke-width=\"1.5\" {}", dash);
  return line(x_of(first), y_of(first * read_bytes), x_of(ridge), y_of(peak), style) +
         line(x_of(ridge), y_of(peak), x_of(kMaxIntensity), y_of(peak), style) +
         text_at(kWidth - kRight + 4, y_of(peak) + 4, fmt::format("{:.0f} TFLOP/s", peak / 1e12));
}

}  // namespace

std::string to_svg(const GpuReport& report) {
  const std::vector<std::string> colours = {"#1f77b4", "#d62728", "#2ca02c", "#9467bd",
                                            "#ff7f0e", "#17becf", "#8c564b", "#e377c2"};
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
      "viewBox=\"0 0 {0:.0f} {1:.0f}\" font-family=\"sans-serif\" font-size=\"11\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
      kWidth, kHeight);
  svg += text_at(kWidth / 2, 18,
                 fmt::format("Attention on {}, {}; rings: the best peer", report.device.name,
                             power_state_name(report.state)),
                 "middle");
  svg += axes();
  svg += roof(report.ceilings.read_bytes, report.ceilings.matmul_flops, "");
  if (report.ceilings.fp8_matmul_flops > 0) {
    svg += roof(report.ceilings.read_bytes, report.ceilings.fp8_matmul_flops,
                "stroke-dasharray=\"5 4\"");
  }
  std::map<std::string, std::string> colour_of;
  for (const GpuResult& r : report.results) {
    if (!r.timed()) continue;
    const auto [entry, is_new] =
        colour_of.try_emplace(r.config.phase, colours[colour_of.size() % colours.size()]);
    const double x =
        x_of(std::clamp(r.config.flops() / r.config.bytes(), kMinIntensity, kMaxIntensity));
    if (const auto peer = best_peer(r.peers)) {
      svg +=
          fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"5\" fill=\"none\" stroke=\"{}\"/>\n",
                      x, y_of(r.config.flops() / peer->seconds), entry->second);
    }
    svg += fmt::format(
        "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\" fill=\"{}\"><title>{}: {:.1f} us, {:.2f} of "
        "the ceiling</title></circle>\n",
        x, y_of(r.config.flops() / r.forward.seconds), entry->second, r.config.name(),
        r.forward.seconds * 1e6, r.ceiling_fraction);
    if (is_new) {
      const double y = kHeight - kBottom - 16.0 * static_cast<double>(colour_of.size());
      svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\" fill=\"{}\"/>\n",
                         kWidth - kRight + 14, y - 4, entry->second);
      svg += text_at(kWidth - kRight + 22, y, r.config.phase);
    }
  }
  return svg + "</svg>\n";
}

}  // namespace fovea::bench
