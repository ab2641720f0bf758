#pragma once

namespace tandem::test {

// A port of this machine that is free now, below those that the system gives to connections: it
// would take one of these again at any time. No other process gets it from here while this one, or
// one that it has forked since, lives.
[[nodiscard]] int unused_port();

}  // namespace tandem::test
