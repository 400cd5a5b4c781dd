// SHA-256 and HMAC-SHA256 against the vectors of FIPS 180-4 / NIST CAVP and RFC 4231.
#include "holmes/bootstrap/sha256.hpp"

#include "check.hpp"
#include "holmes/bootstrap/secret.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

std::string hex(const Digest& digest) { return to_hex(std::string(digest.begin(), digest.end())); }

void test_sha256() {
  CHECK(hex(sha256("")) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(hex(sha256("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")) ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(hex(sha256(std::string(1'000'000, 'a'))) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  CHECK(hex(sha256("\xd3")) == "28969cdfa74a12c82f3bad960b0b000aca2ac329deea5c2328ebc6f2ba9802c1");
  // Lengths around the end of a block, where the padding needs another one.
  CHECK(hex(sha256(std::string(55, 'a'))) == "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
  CHECK(hex(sha256(std::string(56, 'a'))) == "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
  CHECK(hex(sha256(std::string(64, 'a'))) == "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
}

void test_hmac() {
  const std::string key20(20, '\x0b'), keyaa(20, '\xaa'), key131(131, '\xaa');
  std::string key25;
  for (char c = 1; c <= 25; ++c) key25 += c;
  CHECK(hex(hmac_sha256(key20, "Hi There")) == "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(hex(hmac_sha256("Jefe", "what do ya want for nothing?")) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(hex(hmac_sha256(keyaa, std::string(50, '\xdd'))) ==
        "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  CHECK(hex(hmac_sha256(key25, std::string(50, '\xcd'))) ==
        "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  CHECK(hex(hmac_sha256(key131, "Test Using Larger Than Block-Size Key - Hash Key First")) ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK(hex(hmac_sha256(key131,
                        "This is a test using a larger than block-size key and a larger than block-size data. The key "
                        "needs to be hashed before being used by the HMAC algorithm.")) ==
        "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

void test_comparison_and_random() {
  auto left = sha256("a");
  auto right = left;
  CHECK(equal_digests(left, right));
  for (std::size_t i = 0; i < right.size(); ++i) {
    right[i] ^= 1;
    CHECK(!equal_digests(left, right));
    right[i] ^= 1;
  }
  CHECK(random_bytes(32).size() == 32 && random_bytes(32) != random_bytes(32));
}

}  // namespace

int main() {
  test_sha256();
  test_hmac();
  test_comparison_and_random();
  return result("test_sha256");
}
