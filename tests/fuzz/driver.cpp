// Stands in for libFuzzer where there is no clang: mutates a corpus at random, without looking at what is reached.
// usage: fuzz_x [-max_total_time=SECONDS] [-seed=N] [CORPUS_FOLDER ...] [FILE ...]; it writes the input that fails to
// crash-input.
#include <chrono>
#include <csignal>
#include <cstring>
#include <random>

#include "fuzz.hpp"

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv);

namespace {

std::string current;

// Async-signal-safe enough for a process that ends here.
void save_input(int signal) {
  if (FILE* file = std::fopen("crash-input", "wb")) {
    std::fwrite(current.data(), 1, current.size(), file);
    std::fclose(file);
  }
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void run(const std::string& input) {
  current = input;
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(current.data()), current.size());
}

std::string mutated(std::string input, const std::vector<std::string>& corpus, std::mt19937_64& random) {
  constexpr std::size_t max_input_bytes = 4096;
  for (std::uint64_t i = 0, count = 1 + random() % 4; i < count; ++i) {
    const std::size_t at = input.empty() ? 0 : random() % input.size();
    switch (random() % 7) {
      case 0:
        if (!input.empty()) input[at] = static_cast<char>(input[at] ^ (1 << random() % 8));
        break;
      case 1:
        if (!input.empty()) input[at] = static_cast<char>(random());
        break;
      case 2:
        input.insert(at, 1 + random() % 16, static_cast<char>(random()));
        break;
      case 3:
        input.erase(at, 1 + random() % 16);
        break;
      case 4: {  // an interesting number
        constexpr std::uint64_t numbers[] = {0,      1,          0x7f,       0xff,  0x7fff,
                                             0xffff, 0x7fffffff, 0xffffffff, ~0ULL, 1ULL << 62};
        const auto number = numbers[random() % std::size(numbers)];
        const std::size_t bytes = std::size_t{1} << random() % 4;
        if (input.size() >= at + bytes) std::memcpy(input.data() + at, &number, bytes);
        break;
      }
      case 5: {
        const auto& other = corpus[random() % corpus.size()];
        if (!other.empty()) input.insert(at, other.substr(random() % other.size(), 1 + random() % 64));
        break;
      }
      default:
        input.resize(at);
    }
  }
  if (input.size() > max_input_bytes) input.resize(max_input_bytes);
  return input;
}

}  // namespace

int main(int argc, char** argv) {
  LLVMFuzzerInitialize(&argc, &argv);
  double limit_s = 0;
  std::uint64_t seed = std::random_device{}();
  std::vector<std::string> corpus;
  const auto add = [&](const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  };
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.starts_with("-max_total_time=")) {
      limit_s = std::stod(argument.substr(16));
    } else if (argument.starts_with("-seed=")) {
      seed = std::stoull(argument.substr(6));
    } else if (std::filesystem::is_directory(argument)) {
      for (const auto& entry : std::filesystem::directory_iterator(argument)) add(entry.path());
    } else if (!argument.starts_with("-")) {
      add(argument);
    }
  }
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) std::signal(signal, save_input);
  if (corpus.empty()) corpus.emplace_back();
  std::printf("seed %llu, %zu inputs\n", static_cast<unsigned long long>(seed), corpus.size());
  for (const auto& input : corpus) run(input);
  std::mt19937_64 random(seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit_s);
  std::uint64_t runs = corpus.size();
  for (; std::chrono::steady_clock::now() < end; ++runs) run(mutated(corpus[random() % corpus.size()], corpus, random));
  std::printf("Done %llu runs in %.0f second(s)\n", static_cast<unsigned long long>(runs), limit_s);
}
