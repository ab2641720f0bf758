// `tandem bench`: times dispatch, combine and pairs of them in recordings replayed many times.
#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace tandem::tools {

void add_bench(CLI::App& app, std::function<int()>& run);

}  // namespace tandem::tools
