// Reads a truth pack of deltaproof, version 1 (NAME.pack), and checks results against it. Copy me:
// C++17 on a little-endian machine.
//   deltaproof::Pack pack("case.pack");
//   for (const std::string &broken : pack.check("o", result)) ..
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace deltaproof {
class Pack {
    std::map<std::string, std::vector<double>> arrays;
    const std::vector<double> &array(const std::string &name) const {
        static const std::vector<double> none;
        const auto found = arrays.find(name);
        return found == arrays.end() ? none : found->second;
    }

  public:
    explicit Pack(const std::string &path) {
        std::ifstream file(path, std::ios::binary);
        const std::string data((std::istreambuf_iterator<char>(file)), {});
        if (data.compare(0, 8, "DPPACK01") != 0)
            throw std::runtime_error(path + ": no truth pack of version 1");
        std::int64_t count, v[7];
        std::memcpy(&count, &data[8], 8);
        for (std::int64_t i = 0; i < count; i++) {
            const char *entry = &data[16 + 104 * i];
            std::memcpy(v, entry + 48, sizeof v);
            auto &x = arrays[std::string(entry, strnlen(entry, 48))];
            x.resize(static_cast<std::size_t>(v[1] * v[2] * v[3] * v[4] * v[5]));
            std::memcpy(x.data(), &data[static_cast<std::size_t>(v[6])], 8 * x.size());
        }
    }

    // Inputs are "in.q" and so on.
    const std::vector<double> &operator[](const std::string &name) const { return array(name); }
    // "LEVEL UNIT: TIMES times its limit" of every level that is broken.
    std::vector<std::string> check(const std::string &t, const std::vector<double> &got) const {
        const auto &hi = array("truth." + t), &lo = array("truth." + t + ".lo");
        if (hi.empty() || hi.size() != got.size()) return {t + " has not the size of its truth"};
        const std::string of = "limit." + t + ".";
        const auto &bound = array(of + "bound"), &row = array(of + "row");
        const auto &whole = array(of + "tensor_most");
        std::vector<double> rows(bound.size()), parts(row.size()), all(whole.size());
        for (std::size_t i = 0; i < got.size(); i++) {
            const double e = (got[i] - hi[i]) - lo[i];
            if (!rows.empty()) rows[i / (got.size() / rows.size())] += e * e;
            if (!parts.empty()) parts[i / (got.size() / parts.size())] += e * e;
        }
        std::vector<std::string> broken;
        const auto over = [&](const char *level, const std::vector<double> &sum,
                              const std::vector<double> &most) {
            for (std::size_t u = 0; u < most.size(); u++)
                if (const double e = std::sqrt(sum[u]); !(e <= most[u]))
                    return broken.push_back(level + (" " + std::to_string(u)) + ": " +
                                            std::to_string(e / most[u]) + " times its limit");
        };
        over("bound", rows, bound);
        over("row", parts, row);
        for (const char *level : {"window", "unit"}) {
            const auto &which = array(of + level), &most = array(of + level + "_most");
            std::vector<double> sum(most.size());
            for (std::size_t i = 0; i < which.size(); i++) {
                if (which[i] >= 0) sum[static_cast<std::size_t>(which[i])] += parts[i];
                if (which[i] >= 0 && level[0] == 'w') all[0] += parts[i];
            }
            over(level, sum, most);
        }
        over("tensor", all, whole);
        return broken;
    }
};
} // namespace deltaproof
